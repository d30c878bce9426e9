import pytest

from atoll.core.errors import WireError
from atoll.deploy.heads import check_head
from atoll.engines.fleet import PROTOCOL

HELLO = {"do": "hello", "version": PROTOCOL, "run": "r", "method": "fedavg", "rounds": 3,
         "dp": None}  # fmt: skip
STEP = {"do": "step", "run": "r", "owner": "method", "step": "train", "flags": {}, "round": 0,
        "attempt": "a", "state": -2, "key": 7}  # fmt: skip


def test_the_heads_of_a_server_pass():
    for head in (HELLO, STEP, {"do": "ping"}, {"do": "begin", "run": "r", "config": ""}):
        check_head(head)
    check_head({**HELLO, "dp": {"clip": 1, "noise": 2.0, "scores": "kept"}})
    check_head({**STEP, "flags": {"with_auc": True}})


@pytest.mark.parametrize("lacking", [key for key in STEP if key != "do"])
def test_a_field_that_is_missing_is_named(lacking):
    with pytest.raises(WireError, match=f"missing required field `{lacking}`"):
        check_head({key: value for key, value in STEP.items() if key != lacking})


@pytest.mark.parametrize(
    "change",
    [{"key": 1 << 63}, {"key": "7"}, {"round": 0.5}, {"round": None}, {"flags": {"a": 1}},
     {"flags": []}, {"owner": ["method"]}, {"state": {}}, {"attempt": 1}],
)  # fmt: skip
def test_a_field_of_another_type_is_refused(change):
    with pytest.raises(WireError, match=r"its head is not one of 'step' \(.*`\$\."):
        check_head(STEP | change)


def test_a_hello_of_another_version_is_left_to_the_check_of_versions():
    check_head({"do": "hello", "version": "9.9"})
    with pytest.raises(WireError, match="missing required field"):
        check_head({"do": "hello", "version": PROTOCOL})


@pytest.mark.parametrize("what", [None, "delete", 3, ["step"], {}])
def test_nothing_else_can_be_asked(what):
    with pytest.raises(WireError, match="is nothing that a site does"):
        check_head({"do": what})
