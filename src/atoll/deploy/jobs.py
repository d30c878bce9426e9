"""The two classes that a FLARE job names. A kit's allow-list lets no other class run."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomically
from atoll.deploy.coordinator import coordinate, outcome, read_order
from atoll.deploy.delivery import Signer, deliver
from atoll.deploy.kits import read_settings, state_folder
from atoll.deploy.policy import read_policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data
from atoll.deploy.watchdog import Watchdog
from atoll.engines.flare import FlareFleet, FleetController, SiteExecutor
from atoll.engines.fleet import Packet, one_line
from atoll.experiment.hardware import choose_device
from atoll.experiment.result import Result

RESULT = ("result.json", "metrics.csv", "ledger.csv", "config.toml", "audit.jsonl", "roster.json")


class Coordinator(FleetController):
    """The server's part of a job: carry out the run, deliver the model, copy the results."""

    def main(self, fleet: FlareFleet, kit: Path, out: Path) -> None:
        order = read_order(self.order)
        folder = state_folder(kit) / "runs" / order.run
        undelivered: dict[str, str] = {}

        def action() -> Result:
            result = coordinate(order, fleet, folder, self.progress.update)
            try:
                undelivered.update(deliver(order, fleet, folder, Signer(kit)))
            except Exception as error:  # the run is already complete
                logging.getLogger(__name__).exception("the model was not delivered")
                why = f"the server failed to send it ({one_line(error, 300)})"
                undelivered.update(dict.fromkeys(order.members.values(), why))
            return result

        ended = {**outcome(action), "undelivered": undelivered}
        out.mkdir(parents=True, exist_ok=True)
        files = (*map(folder.joinpath, RESULT), *folder.glob("**/seed-*/*"))
        for path in () if ended["status"] == "busy" else files:  # busy: files of another job
            if path.exists():
                to = out / path.relative_to(folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)
        write_atomically(out / "outcome.json", json.dumps(ended).encode())


class Participant(SiteExecutor):
    """Take part in a job at a site, with the data and the policy that the site's owner named."""

    def open(self, kit: Path) -> Callable[[Packet], Packet]:
        settings = read_settings(kit)
        if "data" not in settings:
            raise ConfigError("the site was not started by `atoll federate site`")
        paths = (settings.get(name) for name in ("schema", "policy"))
        schema, policy = (None if path is None else Path(path) for path in paths)
        given = {name: settings[name] for name in ("classes", "split", "seed") if name in settings}
        rules = read_policy(policy)
        path, rare = Path(settings["data"]), rules.rare_categories
        data = read_site_data(path, schema=schema, rare=rare, **given)
        device = choose_device(settings.get("device", "cpu"))
        site = Site(data, rules, state_folder(kit), device, kit)
        self.watchdog = Watchdog(site)
        return self.watchdog.answer

    def sent(self) -> None:
        if self.answer is not None:
            self.watchdog.sent()
