"""Noise that only one site can generate, and that never repeats for different updates.

The numbers depend on a secret of the run at this site, the question, and the clipped update. The
question includes the scale of the noise: the same numbers at two scales would reveal the update.
A repeated question (a retried round, a resumed run) gets the same answer, which reveals nothing
new. An update that differs in one bit gets independent noise. The secret is stored in the folder
of the private states, which are equally sensitive.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import DataError
from atoll.core.tree import Tree, flatten, leaves, unflatten

SECRET = "noise.key"
BYTES = 32


def site_secret(folder: Path) -> bytes:
    """Return the secret of a run at this site. Create it if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SECRET
    if not path.exists():
        fresh = folder / f".{SECRET}"
        fresh.unlink(missing_ok=True)
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    secret = path.read_bytes()
    if len(secret) != BYTES:  # an empty secret would be public knowledge
        raise DataError(f"'{path}' is damaged; delete it, and the run continues with a new one")
    return secret


class SiteNoise:
    """Standard normal numbers for the answer to one question (`core.dp.Noise`)."""

    def __init__(self, secret: bytes, question: bytes) -> None:
        self.secret, self.question = secret, question
        self.release = ""  # identifies the draw: equal for equal answers, reveals nothing else
        self.alone = False  # whether there was no update to noise (`Noised.hides_divergence`)

    def __call__(self, update: Tree, key: Tensor) -> Tree:
        # Hash the question first, so that the border between it and the update cannot be shifted.
        digest = hashlib.sha256(hashlib.sha256(self.question).digest())
        for leaf in leaves(update):
            digest.update(leaf.detach().cpu().contiguous().numpy().tobytes())
        seed = hmac.digest(self.secret, b"noise" + digest.digest(), "sha256")
        self.release = hmac.digest(self.secret, b"release" + digest.digest(), "sha256").hex()[:32]
        self.alone = not any(bool(leaf.any()) for leaf in leaves(update))
        flat, spec = flatten(update)
        sizes = [leaf.numel() for leaf in flat]
        numbers = torch.split(torch.from_numpy(normals(seed, sum(sizes))), sizes)
        pairs = zip(numbers, flat, strict=True)
        # Drawn on the CPU in float64 for any device, and added there without earlier rounding.
        return unflatten([part.reshape(leaf.shape).to(leaf.device) for part, leaf in pairs], spec)


def normals(seed: bytes, count: int) -> np.ndarray:
    """Return standard normal numbers in float64: Box-Muller on the stream of SHAKE-256."""
    pairs = -(-count // 2)
    stream = np.frombuffer(hashlib.shake_256(seed).digest(16 * pairs), dtype="<u8")
    uniform = ((stream >> np.uint64(11)) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:pairs]))
    angle = 2.0 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
