"""docs/settings.md is made from the Structs of ``mesh.config``. To write it: python tests/unit/test_settings_page.py"""

import ast
import json
import operator
from pathlib import Path

import msgspec

from mesh import config

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """# Settings

All of them, with their defaults; made from `mesh/config.py`. A recipe sets what differs, and `--set section.key=value`
overrides it. Unknown keys and values out of bounds are refused at the start; `mesh config show FILE` prints what is in
effect. All numbers are finite, and seconds (`_s`) are positive.

All peers of a run must have `[model]`, `[task]`, `[trainer]` (but for `threads`), `[evaluation]`, `rollout.temperature`
and `rollout.max_new_tokens` alike, and the files that `model.path` (configuration, tokenizer) and `task.data` name; who
differs is refused by name at first contact.
"""


def page() -> str:
    source = Path(config.__file__).read_text()
    lines = source.splitlines()
    limits = {key: allowed for allowed, _, keys in config.LIMITS for key in keys.split()}
    structs = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    out = [HEAD]
    for section in msgspec.structs.fields(config.Config):
        out += [f"## [{section.name}]\n", "| key | default | may be | meaning |", "| --- | --- | --- | --- |"]
        defaults = msgspec.to_builtins(section.type())
        for node in structs[section.type.__name__].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                key, kind = node.target.id, ast.unparse(node.annotation)
                if kind.startswith("Literal"):
                    kind = ", ".join(map(str, ast.literal_eval(f"[{kind[8:-1]}]")))
                kind = kind.split("[")[0] + (f", {limit}" if (limit := limits.get(f"{section.name}.{key}")) else "")
                meaning = lines[node.lineno - 1].partition("  # ")[2].replace("|", "\\|")
                default = json.dumps(defaults[key]) if defaults[key] != {} else "none"
                out.append(f"| `{key}` | {default} | {kind} | {meaning} |")
        out.append("")
    return "\n".join(out)


def test_the_page_of_settings_is_the_one_the_code_gives() -> None:
    assert PAGE.read_text() == page(), f"run: python {Path(__file__).relative_to(PAGE.parents[1])}"


def test_every_limit_is_of_a_setting_that_exists() -> None:
    defaults = config.Config()
    for _, holds, keys in config.LIMITS:
        for key in keys.split():
            assert holds(operator.attrgetter(key)(defaults)), key


if __name__ == "__main__":
    PAGE.write_text(page())
