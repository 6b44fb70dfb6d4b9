"""A message is accepted only from a holder of the token, and only for its intended purpose."""

from __future__ import annotations

import dataclasses
import gc
import json
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from axonlaunch.comm.connection.authenticated_store import AuthenticatedStore, Channel
from axonlaunch.system import authentication
from axonlaunch.system.authentication import Credentials, ForgedMessageError, derive_key

OWN = Credentials(key=derive_key(b"token"), run="run", round=3, sender="member 1")


def test_the_key_is_derived_as_rfc_5869_says() -> None:
    """Test case 3 of its appendix A: the first block has 32 of the 42 bytes."""
    derived = authentication.hkdf_sha256(b"\x0b" * 22, info=b"")
    expected = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"
    assert derived.hex() == expected


def test_a_message_is_read_as_it_was_written() -> None:
    content = {"text": "é", "numbers": [1, 2.5, None]}
    assert (
        OWN.with_sender("member 2").open("name", OWN.seal("name", content), sender="member 1")
        == content
    )


@pytest.mark.parametrize("change", range(0, 150, 7))
def test_no_byte_of_a_message_can_be_changed(change: int) -> None:
    sealed = bytearray(OWN.seal("name", {"step": 1}))
    sealed[change % len(sealed)] ^= 1
    with pytest.raises(ForgedMessageError):
        OWN.open("name", bytes(sealed))


@pytest.mark.parametrize(
    "other",
    [{"run": "another"}, {"round": 2}, {"key": derive_key(b"another token")}],
    ids=["run", "round", "token"],
)
def test_a_message_of_another_run_round_or_token_is_refused(other: dict[str, Any]) -> None:
    sealed = dataclasses.replace(OWN, **other).seal("name", 1)
    with pytest.raises(ForgedMessageError):
        OWN.open("name", sealed)


def test_a_message_of_another_sender_or_key_is_refused() -> None:
    sealed = OWN.seal("name", 1)
    with pytest.raises(ForgedMessageError, match="was written for another sender"):
        OWN.open("name", sealed, sender="member 0")
    with pytest.raises(ForgedMessageError, match="was written for another name"):
        OWN.open("another", sealed)


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[" * 100_000, b"[]", b"{}", b'{"content": 1}', b"\xff" * 10]
)
def test_signed_malformed_message_is_refused(body: bytes) -> None:
    with pytest.raises(ForgedMessageError):
        OWN.open("name", OWN._digest(body) + body)


def test_a_message_has_a_longest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "MOST_BYTES", 1000)
    with pytest.raises(ForgedMessageError, match="1001 bytes are not a message"):
        OWN.open("name", bytes(1001))
    with pytest.raises(ValueError, match="is more than 1000"):
        OWN.seal("name", "x" * 1000)


def test_credentials_do_not_print_their_key() -> None:
    assert "key" not in repr(OWN)
    assert Credentials.random(sender="").key != Credentials.random(sender="").key


def test_torch_gets_no_value_that_a_stranger_wrote() -> None:
    inner = dist.HashStore()
    store = AuthenticatedStore(inner, OWN)
    torchs = dist.PrefixStore("group", store)  # as torch wraps its argument
    torchs.set("address", b"\x00\xff of gloo")
    assert torchs.get("address") == b"\x00\xff of gloo"
    assert (
        AuthenticatedStore(inner, OWN.with_sender("member 0")).get("group/address")
        == b"\x00\xff of gloo"
    )
    inner.set("group/address", "of a stranger")
    with pytest.raises(ForgedMessageError):
        torchs.get("address")
    inner.set("group/address", OWN.seal("group/another", "AAAA"))
    with pytest.raises(ForgedMessageError):
        torchs.get("address")


def test_torch_counts_and_waits_through_it() -> None:
    authenticated = AuthenticatedStore(dist.HashStore(), OWN)
    store = dist.PrefixStore("group", authenticated)
    assert [store.add("count", 1), store.add("count", 2)] == [1, 3]
    store.set("key", "value")
    store.wait(["key"], timedelta(seconds=5))
    assert store.check(["key"])
    assert not store.check(["another"])
    with pytest.raises(dist.DistStoreError):
        store.wait(["another"], timedelta(seconds=0.1))


def test_cloned_store_keeps_its_python_methods() -> None:
    """torch's threads use a clone, and C++ does not keep its Python methods alive."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = AuthenticatedStore(server, OWN)
    torchs = dist.PrefixStore("group", store).clone()
    gc.collect()
    torchs.set("key", "value")
    assert store.get("group/key") == b"value"


def test_channel_ignores_forged_messages_and_waits_for_missing_ones() -> None:
    inner = dist.HashStore()
    channel = Channel(inner, OWN)
    channel.put("a", 1)
    inner.set("b", json.dumps(2))
    assert channel.get_each({"a": OWN.sender, "b": OWN.sender}) == [1, None]
    assert channel.get_each({"a": "member 0"}) == [None]
    with pytest.raises(TimeoutError):
        channel.wait("c", timeout_s=0.1)
