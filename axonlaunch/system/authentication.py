"""Signed messages between the members of a run, in torch's store.

Any process that connects to the store can read and write it. Therefore each message contains its
run, round, sender and the store key, with an HMAC over all of these and the content. Messages are
JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Self

MOST_BYTES = 4 * 2**20
"""Maximum size of a message. A store holds values of up to 8 MiB."""
_DIGEST = "sha256"
_PURPOSE = b"axonlaunch messages 1"
_HEX = 64


class ForgedMessageError(Exception):
    """A message was not signed with the run's token, or it was written for another key or run."""


def derive_key(token: bytes) -> bytes:
    """Derive the key of a run's messages from its token by HKDF-SHA256 (RFC 5869).

    Without a token (``b""``) the key is public. Messages of different runs are still distinguished,
    but anyone can forge messages.
    """
    return hkdf_sha256(token, info=_PURPOSE)


def hkdf_sha256(secret: bytes, *, info: bytes) -> bytes:
    """Derive 32 bytes for a purpose, without a salt (RFC 5869).

    One block of output is one step of "expand" (section 2.3): ``HMAC(PRK, info | 0x01)``. Without a
    salt, "extract" (2.2) uses zeros of the hash's length.
    """
    pseudorandom = hmac.digest(bytes(hashlib.sha256().digest_size), secret, _DIGEST)
    return hmac.digest(pseudorandom, info + b"\x01", _DIGEST)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials with which a member of a run signs its messages and verifies those of others.

    Attributes:
        key: Key from ``derive_key``.
        run: Random name of the run; messages of other runs with the same token are rejected.
        round: Number of the attempt at the run; messages of earlier attempts are rejected.
        sender: Name of this member, such as ``node 1`` or ``rank 3``.
    """

    key: bytes = field(repr=False)
    run: str
    round: int = 0
    sender: str

    @classmethod
    def random(cls, *, sender: str) -> Self:
        """Create credentials of a new run. This process must distribute them to the members."""
        key = derive_key(secrets.token_bytes(32))
        return cls(key=key, run=secrets.token_hex(8), sender=sender)

    def with_sender(self, sender: str) -> Self:
        """Return the same credentials with another sender."""
        return dataclasses.replace(self, sender=sender)

    def seal(self, name: str, content: Any) -> bytes:
        """Return a signed message.

        Args:
            name: Store key of the message.
            content: Plain values.

        Raises:
            ValueError: The message is longer than ``MOST_BYTES``.
        """
        # The signature covers the bytes as sent, so JSON formatting does not matter.
        message = {
            "run": self.run,
            "round": self.round,
            "sender": self.sender,
            "name": name,
            "content": content,
        }
        body = json.dumps(message).encode()
        if _HEX + len(body) > MOST_BYTES:
            raise ValueError(f"{name}: a message of {len(body)} bytes is more than {MOST_BYTES}")
        return self._digest(body) + body

    def open(self, name: str, sealed: bytes, *, sender: str | None = None) -> Any:
        """Verify a signed message and return its content.

        Args:
            name: Store key of the message.
            sealed: Message returned by ``seal``.
            sender: Required sender; None accepts any member.

        Raises:
            ForgedMessageError: The signature is wrong, or the message was written by another sender
                or for another key, round or run.
        """
        if len(sealed) > MOST_BYTES:
            raise ForgedMessageError(f"{name}: {len(sealed)} bytes are not a message of this run")
        body = sealed[_HEX:]
        if not hmac.compare_digest(sealed[:_HEX], self._digest(body)):
            raise ForgedMessageError(f"{name}: not signed with this run's token")
        try:
            message = json.loads(body)
            content = message.pop("content")
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
            # Without a token anyone can sign messages.
            raise ForgedMessageError(f"{name}: is not a message") from error
        expected = {
            "run": self.run,
            "round": self.round,
            "sender": message.get("sender") if sender is None else sender,
            "name": name,
        }
        if message != expected:
            different = [key for key in expected if message.get(key) != expected[key]]
            raise ForgedMessageError(f"{name}: was written for another {' and '.join(different)}")
        return content

    def _digest(self, body: bytes) -> bytes:
        return hmac.digest(self.key, body, _DIGEST).hex().encode()
