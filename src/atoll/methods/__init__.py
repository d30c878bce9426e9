"""The registry of methods. A method's name is its class name in lower case, with "+" for "plus".

Each method has its own file. To learn how a method is written, read `fedavg.py`, `fedprox.py` and
then `core/training.py`.

Examples:
    >>> from atoll.methods import METHODS, FedAvg
    >>> METHODS["fedavg"] is FedAvg
    True
    >>> FedAvg.paper.endswith("AISTATS 2017")
    True
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from atoll.core.aggregate import SERVER_RATES
from atoll.core.errors import ConfigError, described, unknown
from atoll.core.files import file_digest
from atoll.core.method import Method
from atoll.methods.adafgl import AdaFGL as AdaFGL
from atoll.methods.fedath import FedATH as FedATH
from atoll.methods.fedaux import FedAux as FedAux
from atoll.methods.fedavg import FedAvg as FedAvg
from atoll.methods.feddc import FedDC as FedDC
from atoll.methods.fedgnn import FedGNN as FedGNN
from atoll.methods.fedgta import FedGTA as FedGTA
from atoll.methods.fediih import FedIIH as FedIIH
from atoll.methods.fedopt import FedOpt as FedOpt
from atoll.methods.fedper import FedPer as FedPer
from atoll.methods.fedproto import FedProto as FedProto
from atoll.methods.fedprox import FedProx as FedProx
from atoll.methods.fedpub import FedPUB as FedPUB
from atoll.methods.fedsage import FedSage as FedSage
from atoll.methods.fedsage_plus import FedSagePlus as FedSagePlus
from atoll.methods.fedtad import FedTAD as FedTAD
from atoll.methods.fedtgp import FedTGP as FedTGP
from atoll.methods.fgssl import FGSSL as FGSSL
from atoll.methods.gcfl import GCFL as GCFL
from atoll.methods.local import Local as Local
from atoll.methods.moon import MOON as MOON
from atoll.methods.reef import Reef as Reef
from atoll.methods.scaffold import Scaffold as Scaffold

GENERAL = (Local, FedAvg, FedProx, Scaffold, FedDC, FedOpt, MOON, FedProto, FedTGP, FedPer)
GRAPHS = (
    AdaFGL,
    FedATH,
    FedAux,
    FedGNN,
    FedGTA,
    FedIIH,
    FedPUB,
    FedSage,
    FedSagePlus,
    FedTAD,
    FGSSL,
    GCFL,
    Reef,
)
METHODS: dict[str, type[Method]] = {
    cls.__name__.lower().replace("plus", "+"): cls for cls in GENERAL + GRAPHS
}


DIGEST = "__sha256__"
"""The attribute of a user's module with the SHA-256 of the file that this process loaded."""


def split_preset(text: str) -> tuple[str, str]:
    """Return the registered name and the preset in a method's name: gcfl and plus for `GCFL+`.

    Most names have no preset. FILE.py:CLASS and unknown names are unchanged.
    """
    plain = re.sub("[-_ ]", "", text.lower()).replace("plus", "+")
    base, plus, rest = plain.partition("+")
    preset = f"plus-{rest}" if rest else "plus"
    if plus and base in METHODS and preset in METHODS[base].presets:
        return base, preset
    return (plain if plain in METHODS else text), ""


def method_name(text: str) -> str:
    """Return a method's usual name, such as `fedpub` for `FED-PUB`. FILE.py:CLASS is unchanged."""
    name, preset = split_preset(text)
    return name + preset.replace("plus", "+").replace("-", "")


def method_class(name: str) -> type[Method]:
    """Return a method's class, also for "my_method.py:Mine" or "package.module:Mine"."""
    if (known := split_preset(name)[0]) in METHODS:
        return METHODS[known]
    name += ":" if name.endswith(".py") else ""  # the error below lists the file's classes
    if ":" not in name:
        if (server := name.lower().removeprefix("fed")) in SERVER_RATES:
            hint = f"it is fedopt with --set server_optimizer={server}"
            raise ConfigError(f"unknown method '{name}'; {hint}")
        raise unknown("method", name, METHODS)
    where, _, attribute = name.rpartition(":")
    name = name.rstrip(":")
    if not where.endswith(".py") and not all(part.isidentifier() for part in where.split(".")):
        hint = "write FILE.py:CLASS or package.module:CLASS"
        raise ConfigError(f"method '{name}' names no file and no module; {hint}")
    try:
        module = _module(where)
        vars(module).setdefault(DIGEST, file_digest(module.__file__ or ""))
        found = getattr(module, attribute, None)
    except (ImportError, OSError, SyntaxError) as error:
        if isinstance(error, ImportError) and (error.name or "").startswith("atoll."):
            raise ConfigError(
                f"method '{name}' imports a name from {error.name} that does not exist; import it "
                "from atoll itself: from atoll import fit, average, ... (see docs/own-method.md)"
            ) from error
        raise ConfigError(f"method '{name}' cannot be loaded: {error}") from error
    except (Exception, SystemExit) as error:  # the file's own code, which may raise anything
        why = f"{described(error)}; correct it"
        raise ConfigError(f"method '{name}' cannot be loaded: {why}") from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        types = [one for one in vars(module).values() if isinstance(one, type)]
        types = [one for one in types if one.__module__ == module.__name__]
        own = [f"{where}:{one.__name__}" for one in types if issubclass(one, Method)]
        names = " or ".join(own) or f"a class(atoll.Method) in {where}"
        what = f"has no method '{attribute}'" if attribute else "is a file, and no class is named"
        raise ConfigError(f"'{where}' {what}; write {names}")
    return found


def method_files(*names: str) -> dict[str, str]:
    """Return the SHA-256 of the file of each user's method that this process has loaded."""
    found: dict[str, str] = {}
    for where in (name.rpartition(":")[0] for name in names):
        in_file = where.endswith(".py")
        module = sys.modules.get(Path(where).stem if in_file else where)
        if module is not None and (digest := getattr(module, DIGEST, "")):
            found[where if in_file else str(module.__file__)] = digest
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
    sys.modules[path.stem] = module  # dataclasses and records look up their own module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
