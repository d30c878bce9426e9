"""`atoll federate verify`."""

from __future__ import annotations

import shutil

from click.testing import CliRunner

from atoll.cli import main
from atoll.experiment.folder import RunFolder
from tests.deploy.test_delivery import made, trial

__all__ = ["made", "trial"]  # fixtures


def verify(*words):
    return CliRunner().invoke(main, ["federate", "verify", *map(str, words)])


def test_a_delivered_model_is_verified_and_a_changed_one_refused(trial):
    assert trial.run() == {}
    kit, model = trial.kits / "site-1", trial.model()
    done = verify(model, "--kit", kit)
    assert done.exit_code == 0
    round = RunFolder(trial.folder()).model().rounds[0] + 1
    said = f"signed by the server: run run for site-1 (seed 0: round {round})\n"
    assert done.output == said
    (model / "seed-0" / "model.toml").write_text("")
    done = verify(model, "--kit", kit)
    assert done.exit_code == 2
    assert "is missing, or was changed" in done.output
    assert "holds no delivered model" in verify(kit, "--kit", kit).output
    assert "needs a site's kit" in verify(model, "--kit", trial.kits / "server").output
    shutil.rmtree(kit / "startup")
    assert "is not the kit of a site" in verify(model, "--kit", kit).output
