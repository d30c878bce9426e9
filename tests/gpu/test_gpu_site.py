"""A site with a GPU: the same replies as on the CPU, up to rounding."""

from __future__ import annotations

import pytest
import torch

import atoll
from atoll.core.tree import leaves
from atoll.deploy.coordinator import coordinate
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data
from atoll.engines.codec import decode
from atoll.testing import small_federation
from tests.deploy.conftest import ALL, Room
from tests.deploy.private_site import DP, ask, begin, make_site, model_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("name", ["fedavg", "fedath", "fedper", "gcfl", "fedproto"])
def test_a_run_with_gpus_at_some_sites_equals_the_serial_run(name, tmp_path):
    federation = small_federation()
    room = Room(tmp_path, federation)
    files = dict(zip(room.names, room.files, strict=True))
    sites = {
        site: Site(read_site_data(file), ALL, tmp_path / site, device)
        for (site, file), device in zip(files.items(), ("cuda", "cpu", "cuda", "cpu"), strict=True)
    }
    options = {"rounds": 3, "set": {"hidden": 5}}
    result = coordinate(
        room.order(name, **options), room.fleet(sites=sites), tmp_path / "server", lambda _: None
    )
    expected = atoll.run(name, federation, engine="serial", device="cpu", **options)
    for key, value in expected.metrics().items():
        assert result.metrics()[key]["mean"] == pytest.approx(value["mean"], abs=1e-5), key
    job = sites["site-1"].job
    assert job is not None
    assert job.graph.real.device.type == "cuda"
    assert {leaf.device.type for leaf in leaves(job.state)} <= {"cpu"}


@pytest.mark.parametrize("dp", [None, DP])
def test_a_reply_from_a_gpu_is_that_of_the_cpu(dp, tmp_path):
    if dp is not None:
        pytest.importorskip("dp_accounting", reason="a private run needs dp-accounting")
    replies = []
    for device in ("cpu", "cuda"):
        site = make_site(tmp_path / device)
        site.device = torch.device(device)
        begin(site, dp=dp)
        answer = ask(site, model_for(site))
        assert answer.head == {}
        replies.append(decode(answer.body))
    for one, other in zip(*map(leaves, replies), strict=True):
        assert other.device.type == "cpu"
        if dp is None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        else:  # the noise is each site's own
            assert one.shape == other.shape
            assert torch.isfinite(other).all()
