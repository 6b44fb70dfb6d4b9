"""Messages that only a holder of a run's token can write, and only for the place they are read at.

torch's store keeps bytes for whoever connects. So each message names its run, round, sender and the
key it stands under, and carries an HMAC over all of it; it is JSON, and nothing else is read.
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
"""The longest message that is read. A store holds values of 8 MiB at most."""
_DIGEST = "sha256"
_PURPOSE = b"axonlaunch messages 1"
_HEX = 64


class ForgedMessageError(Exception):
    """A message was not written by a holder of the token, or not for this place."""


def derive_key(token: bytes) -> bytes:
    """Derive the key of a run's messages from its token by HKDF-SHA256 (RFC 5869).

    Without a token (``b""``) the key is known to everybody: messages of two runs are still kept
    apart, and strangers' are not.
    """
    return hkdf_sha256(token, info=_PURPOSE)


def hkdf_sha256(secret: bytes, *, info: bytes) -> bytes:
    """Derive 32 bytes for a purpose, without a salt (RFC 5869).

    One block of output is one step of "expand" (section 2.3): ``HMAC(PRK, info | 0x01)``. Without a
    salt "extract" (2.2) takes zeros of the hash's length.
    """
    pseudorandom = hmac.digest(bytes(hashlib.sha256().digest_size), secret, _DIGEST)
    return hmac.digest(pseudorandom, info + b"\x01", _DIGEST)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What a member of a run writes its messages with, and reads the others'.

    Attributes:
        key: Of ``derive_key``.
        run: The run's random name: a message of another run with the same token is refused.
        round: The attempt at the run: a message of an earlier one is refused.
        sender: Who this is, as in ``node 1`` or ``rank 3``.
    """

    key: bytes = field(repr=False)
    run: str
    round: int = 0
    sender: str

    @classmethod
    def random(cls, *, sender: str) -> Self:
        """Make those of a new run whose members get theirs from this process."""
        key = derive_key(secrets.token_bytes(32))
        return cls(key=key, run=secrets.token_hex(8), sender=sender)

    def of(self, sender: str) -> Self:
        """Return the same for another member."""
        return dataclasses.replace(self, sender=sender)

    def seal(self, name: str, content: Any) -> bytes:
        """Write a message.

        Args:
            name: The key it is to stand under.
            content: Plain values.
        """
        # The body is signed as it is sent, so nobody needs to write the same JSON twice.
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
        """Read a message.

        Args:
            name: The key it stood under.
            sealed: As ``seal`` wrote it.
            sender: Who must have written it; None: any member.

        Raises:
            ForgedMessageError: It was not, or not under this key in this round of this run.
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
            # Without a token anybody can sign.
            raise ForgedMessageError(f"{name}: is not a message") from error
        expected = {
            "run": self.run,
            "round": self.round,
            "sender": message.get("sender") if sender is None else sender,
            "name": name,
        }
        if message != expected:
            wrong = [key for key in expected if message.get(key) != expected[key]]
            raise ForgedMessageError(f"{name}: was written for another {' and '.join(wrong)}")
        return content

    def _digest(self, body: bytes) -> bytes:
        return hmac.digest(self.key, body, _DIGEST).hex().encode()
