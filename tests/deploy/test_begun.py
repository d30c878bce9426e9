"""One name, one configuration, one encoder."""

from __future__ import annotations

import pytest

from atoll.core.errors import ConfigError
from atoll.deploy.audit import Audit
from atoll.deploy.begun import Begun, digest_of, ordered
from atoll.deploy.policy import Refusal

TEXT = 'method = "fedavg"\nrounds = 2\n'


def test_a_run_keeps_its_first_configuration_and_encoder(tmp_path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    news = Begun(audit, "r-0").news(ordered(TEXT), TEXT, "abc")
    assert news == {"config": TEXT, "encoder": "abc"}
    audit.note("begin", run="r-0", **news)
    begun = Begun(audit, "r-0")
    assert begun.news(ordered(TEXT), TEXT, "abc") == {}
    with pytest.raises(Refusal, match="with another encoder of its tables"):
        begun.news(ordered(TEXT), TEXT, "abd")
    audit.note("begin", run="r-0", **begun.news(ordered(TEXT), TEXT, "abc", "these"))
    with pytest.raises(Refusal, match="with other data; start the site with those"):
        Begun(audit, "r-0").news(ordered(TEXT), TEXT, "abc", "those")
    assert Begun(audit, "r-0").news(ordered(TEXT), TEXT, "abc", "these") == {}
    with pytest.raises(Refusal, match="with another configuration"):
        begun.check(ordered(TEXT.replace("2", "3")))
    assert Begun(audit, "r-1").configs == []


def test_all_seeds_of_a_run_have_the_same_data(tmp_path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.note("begin", run="r-0", data="these")
    assert "data" not in Begun(audit, "r-1").news(ordered(TEXT), TEXT, "", "these")
    with pytest.raises(Refusal, match="with other data"):
        Begun(audit, "r-1").news(ordered(TEXT), TEXT, "", "those")
    assert Begun(audit, "s-1").data == []


def test_an_encoder_that_is_not_the_noted_one_is_refused(tmp_path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.note("begin", run="own-0", config=TEXT, encoder=digest_of([]))
    assert Begun(audit, "own-0").encoder(tmp_path) == []
    audit.note("begin", run="r-0", config=TEXT, encoder="abc")
    with pytest.raises(Refusal, match="is not whole in its runs/r-0"):
        Begun(audit, "r-0").encoder(tmp_path)
    audit.note("begin", run="old-0", config=TEXT)
    with pytest.raises(Refusal, match="an earlier version began it"):
        Begun(audit, "old-0").encoder(tmp_path)


def test_a_configuration_that_is_no_toml_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="the server's configuration is not valid TOML"):
        ordered("a = " + "[" * 5000)
