"""Peer memory: which ranks can read it, and that all ranks or none do."""

from types import SimpleNamespace

import pytest
import torch

from halfbyte.mesh import peer_memory

OWN = [torch.arange(80, dtype=torch.uint8)]
DEVICE = SimpleNamespace(type="cuda", index=0)
OTHER = [torch.arange(80, dtype=torch.uint8) + 1]


def offer(host=None, index=1, tensors=OTHER, sample=None):
    """Return a handle offer whose tensors are rebuilt from more than seven arguments; the device is the reader's."""

    def rebuild(*given):
        assert given[peer_memory.DEVICE] == DEVICE.index
        return given[0]

    handles = [(rebuild, (tensor, *"bcdef", index, "h")) for tensor in tensors]
    return host or peer_memory._host(), index, handles, sample or OTHER[0][: peer_memory.SAMPLE].tolist()


@pytest.fixture
def access(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 7)


def test_cpu_has_no_peer_memory():
    assert peer_memory.map_peer_tensors(OWN, None) == (None, "")
    assert peer_memory.map_peer_tensors([], None) == (None, "")


def test_own_rank_gets_no_handle(monkeypatch):
    """A handle that is never opened would keep its memory allocated."""
    monkeypatch.setattr(peer_memory, "reduce_tensor", lambda tensor: ("rebuild", (tensor,)))
    offers = peer_memory._share_handles(OWN, DEVICE, 3, 1)
    assert [len(handles) for _, _, handles, _ in offers] == [1, 0, 1]


@pytest.mark.usefixtures("access")
def test_tensors_are_in_rank_order():
    found, why = peer_memory._open_handles(OWN, [offer(), offer()], 1, DEVICE)
    assert not why
    assert len(found) == 1
    assert found[0][0] is OTHER[0]
    assert found[0][1] is OWN[0]


@pytest.mark.usefixtures("access")
@pytest.mark.parametrize(
    ("other", "why"),
    [
        (offer(host=("elsewhere", "", "")), "several hosts"),
        (offer(index=7), "GPU 0 has no access to GPU 7"),
        (offer(index=0), "GPU 0 has no access to GPU 0"),
        (offer(sample=[9]), "reads other bytes"),
        ("operation not permitted", "operation not permitted"),
    ],
)
def test_unreadable_peer_memory_is_reported(other, why):
    assert why in peer_memory._open_handles(OWN, [offer(), other], 0, DEVICE)[1]


def case_one_cannot(mesh, unable):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "synchronize", lambda _: None)
        patched.setattr(peer_memory, "_share_handles", lambda own, device, ways, place: [()] * ways)
        opened = ([], "no access") if mesh.rank == unable else ([OWN], "")
        patched.setattr(peer_memory, "_open_handles", lambda *_: opened)
        patched.setattr(peer_memory, "_outcomes", [])
        held, why = peer_memory.map_peer_tensors([SimpleNamespace(device=DEVICE)], mesh.group("shard"))
        return held is not None, why, list(peer_memory._outcomes)


@pytest.mark.dist
@pytest.mark.parametrize("unable", [None, 0, 1])
def test_all_ranks_read_or_none(two, unable):
    expected = (True, "", [True]) if unable is None else (False, "no access", [False])
    assert two.run(case_one_cannot, unable, layout={"shard": 2}) == [expected] * 2


def test_peer_memory_is_released_before_exit(monkeypatch):
    said = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: said.append("collected"))
    monkeypatch.setattr(peer_memory, "_outcomes", [])
    peer_memory.release_peer_memory(lambda: said.append("waited"))
    assert said == []
    peer_memory._outcomes.append(True)
    held = peer_memory.PeerTensors([[OWN[0], OTHER[0]]])
    peer_memory.release_peer_memory(lambda: said.append("waited"))
    assert held.by_tensor == [[]]
    assert said == ["waited", "collected"]
