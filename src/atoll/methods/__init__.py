"""Every method, by its class's name in lower case. One file each.

Examples:
    >>> from atoll.methods import METHODS, FedAvg
    >>> METHODS["fedavg"] is FedAvg
    True
    >>> FedAvg.paper.endswith("AISTATS 2017")
    True
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from atoll.core.errors import ConfigError, unknown
from atoll.core.method import Method
from atoll.methods.adafgl import AdaFGL
from atoll.methods.fedath import FedATH
from atoll.methods.fedavg import FedAvg
from atoll.methods.feddc import FedDC
from atoll.methods.fedgnn import FedGNN
from atoll.methods.fedgta import FedGTA
from atoll.methods.fediih import FedIIH
from atoll.methods.fedopt import FedOpt
from atoll.methods.fedper import FedPer
from atoll.methods.fedproto import FedProto
from atoll.methods.fedprox import FedProx
from atoll.methods.fedpub import FedPUB
from atoll.methods.fedsage import FedSage
from atoll.methods.fedsage_plus import FedSagePlus
from atoll.methods.fedtad import FedTAD
from atoll.methods.fgssl import FGSSL
from atoll.methods.gcfl import GCFL
from atoll.methods.local import Local
from atoll.methods.moon import MOON
from atoll.methods.scaffold import Scaffold

FOR_ANY_DATA = (Local, FedAvg, FedProx, Scaffold, FedDC, FedOpt, MOON, FedProto, FedPer)
FOR_GRAPHS = (
    *(AdaFGL, FedATH, FedGNN, FedGTA, FedIIH, FedPUB),
    *(FedSage, FedSagePlus, FedTAD, FGSSL, GCFL),
)
METHODS: dict[str, type[Method]] = {
    cls.__name__.lower().replace("plus", "+"): cls for cls in (*FOR_ANY_DATA, *FOR_GRAPHS)
}


def method_class(name: str) -> type[Method]:
    """The method with this name, or a user's own: "my_method.py:Mine" or "package.module:Mine"."""
    if ":" not in name:
        if name.lower() not in METHODS:
            raise unknown("method", name, METHODS)
        return METHODS[name.lower()]
    where, _, attribute = name.rpartition(":")
    try:
        found = getattr(_module(where), attribute, None)
    except (ImportError, OSError, SyntaxError) as error:
        if isinstance(error, ImportError) and (error.name or "").startswith("atoll."):
            raise ConfigError(
                f"method '{name}' imports a name from {error.name} that is not there; import it "
                "from atoll itself: from atoll import fit, average, ... (see docs/own-method.md)"
            ) from error
        raise ConfigError(f"method '{name}' cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(
            f"{where} has no class '{attribute}' that is a Method; see CONTRIBUTING.md"
        )
    return found


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where).resolve()
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {where}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and records look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


__all__ = [
    "FGSSL",
    "GCFL",
    "METHODS",
    "MOON",
    "AdaFGL",
    "FedATH",
    "FedAvg",
    "FedDC",
    "FedGNN",
    "FedGTA",
    "FedIIH",
    "FedOpt",
    "FedPUB",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedSage",
    "FedSagePlus",
    "FedTAD",
    "Local",
    "Scaffold",
    "method_class",
]
