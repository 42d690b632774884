"""What a rank imports, and what becomes of the rest when somebody wants it: `python import_cases.py FOLDER`.

A line of JSON: "too early", what was imported and should not have been; else whether each thing is as it should be.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

from launcher.prepared import cache_dir
from launcher.training.spared import change_imports, spare_imports
from tests.tiny import tiny_plan

UNUSED = (
    *("torch._dynamo.utils", "torch.distributed.tensor", "sympy"),
    *("torchvision.models.resnet", "torchvision.datasets.mnist", "torchvision.ops.roi_align"),
)


def main(folder: Path) -> dict[str, Any]:
    """The cases, in the order in which they need each other."""
    whose = metadata.packages_distributions
    plan = tiny_plan(folder)
    spare_imports(plan)
    change_imports(plan)
    import peft  # noqa: F401
    import torch
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, Qwen3VLProcessor  # noqa: F401

    early = [name for name in UNUSED if name in sys.modules]
    compiler = sys.modules["torch._dynamo"]
    (first, later) = (torch.compiler.disable(_twice), torch.compiler.allow_in_graph(_noted))
    weight = torch.nn.Parameter(torch.ones(2))
    torch.optim.AdamW([weight]).step()  # its functions are marked, and its step breaks a graph
    waits = first(2) == 4 and "torch._dynamo.utils" not in sys.modules
    from torch._dynamo.utils import is_compile_supported  # what torchvision does: a submodule, then its package

    compiled = torch.compile(lambda x: _noted(x) + 1, backend="eager")(torch.ones(2))
    return {
        "too early": early,
        "waits": waits and later is _noted,
        "same": compiler is torch._dynamo is sys.modules["torch._dynamo"] and not hasattr(compiler, "no_such_name"),
        "submodule": sys.modules["torch._dynamo.utils"].is_compile_supported is is_compile_supported,
        "real": isinstance(torch._dynamo.graph_break, FunctionType) and torch._dynamo.disable.__module__ != __name__,
        "told": id(_noted) in torch._dynamo.trace_rules._allowed_callable_ids,
        "compiles": compiled.tolist() == [3.0, 3.0] and first(2) == 4,
        "torchvision": _torchvision(),
        "names": _names(),
        "packages": _packages(whose),
    }


def _twice(x: Any) -> Any:
    return 2 * x


def _noted(x: Any) -> Any:
    return 2 * x


def _torchvision() -> bool:
    import torchvision
    from torchvision.ops import nms, roi_align

    own = torchvision.ops.roi_align is roi_align and torchvision.ops.nms is nms
    return own and callable(torchvision.models.resnet18) and callable(torchvision.datasets.FakeData)


def _names() -> bool:
    """A file holds all that reading the models' files gives."""
    from transformers.utils import import_utils

    ours: Any = import_utils.define_import_structure
    models = Path(str(import_utils.__file__)).parents[1] / "models"
    asked = ((models, "models"), (str(models / "__init__.py"), None))  # by transformers itself and by its models
    found, real = ([ask(*words) for words in asked] for ask in (ours, ours.args[0]))
    for file in (cache_dir().parent / "imports").iterdir():
        file.write_text("[1]")  # somebody else's
    return found == [ours(*words) for words in asked] == real and all(len(one) > 1 for one in real)


def _packages(whose: Any) -> bool:
    from launcher.training.spared import _installed, _kept, _lists

    again = [_kept("packages", _installed(), whose, _lists) for _ in range(2)]
    return metadata.packages_distributions is whose and again == [dict(whose())] * 2


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
