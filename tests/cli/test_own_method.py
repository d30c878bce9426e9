"""A method in a file of the user's own runs from the command line."""

import json
from pathlib import Path

CODE = '''
"""Mine: FedAvg with plain means."""
from dataclasses import dataclass
from typing import ClassVar
from atoll.core.fit import fit
from atoll.core.losses import cross_entropy
from atoll.core.message import ToAll
from atoll.core.method import Method, client_step
from atoll.core.aggregate import average
from atoll.core.optim import Adam, Optimizer
from atoll.core.tree import Tree, record

@record
class Update:
    model: Tree

@dataclass(frozen=True)
class Mine(Method):
    optimizer: Optimizer = Adam()
    epochs: int = 3
    paper: ClassVar[str] = "none"

    def init(self, clients):
        return self.net.init(clients.key)

    def round(self, server, clients):
        return average(clients.map(self.train, ToAll(server)).model)

    def deploy(self, server):
        return ToAll(server)

    @client_step
    def train(self, graph, model, state, key):
        model, state = fit(self.loss, model, self.optimizer, state, self.epochs, key, graph)
        return Update(model), state
'''
SMALL = ("--data", "lagoon:nodes=200", "--clients", 3, "--rounds", 2, "--set", "hidden=8")


def test_a_file_of_my_own_runs_equals_uniform_fedavg_and_resumes(cli, tmp_path: Path) -> None:
    (tmp_path / "cli_own_method.py").write_text(CODE)
    mine = cli("run", "cli_own_method.py:Mine", *SMALL, "--json", "--quiet", "--out", "a")
    plain = cli("run", "fedavg", *SMALL, "--set", "weight_by=uniform", "--json", "--quiet")
    found, expected = (json.loads(r.stdout.splitlines()[-1]) for r in (mine, plain))
    assert found["metrics"]["test_accuracy"] == expected["metrics"]["test_accuracy"]
    assert found["method"] == "cli_own_method.py:Mine"
    again = cli("run", "--resume", "a", "--json", "--quiet")
    assert json.loads(again.stdout.splitlines()[-1])["metrics"] == found["metrics"]
    assert "Mine: FedAvg with plain means" in cli("methods", "cli_own_method.py:Mine").stdout


def test_what_cannot_be_loaded_is_one_sentence(cli, tmp_path: Path) -> None:
    assert "there is no file nowhere.py" in cli("run", "nowhere.py:Mine", code=2).stderr
    (tmp_path / "cli_broken.py").write_text("def (")
    assert "cannot be loaded" in cli("run", "cli_broken.py:Mine", code=2).stderr
    (tmp_path / "cli_empty.py").write_text("Mine = 3")
    assert "has no class 'Mine' that is a Method" in cli("run", "cli_empty.py:Mine", code=2).stderr
    assert "No module named" in cli("run", "no_such_package:Mine", code=2).stderr
