"""Counts habits that save statements and cost readers.

    python tests/code_habits.py [--list RULE] [FOLDER ...]    # e.g. --list R3 prints the places; default: all folders

A joined statement saves no node of the syntax tree: `a, b = x, y` has one more than two assignments.

    R1  a call unpacks a tuple that the same function packed, or a literal one: f(*(a, b))
    R2  a call unpacks a dictionary that the same function packed for this call alone
    R3  a tuple assignment with an attribute on the left: self.a, self.b = x, y
    R4  a tuple assignment of locals from a tuple or a generator, other than a swap or of plain values (a, b = 0, [])
    R5  an attribute set on an object that the function has not made: other.thing = x (x.grad = None and such may, and
        a counter of `progress`, which the loop writes with each batch: there a call would cost as much as a hook)
    R6  an attribute set by its name: switched_on(other, "name"), setattr with a computed name
    R7  a text or a list times a condition: [x] * (y is not None)
    R8  a conditional expression in the body or the test of another, or a chain of four branches
    R9  a loop over a conditional, a conditional or a tuple as a statement
    R10 a constructor with more than six parameters (hooks, datasets, MainLoop and TorchModel are schemas: not counted)

`tests/test_code_habits.py` has the places that are left, which only get fewer. A private attribute of another object is
SLF001 of ruff.
"""

import argparse
import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("emrun", "hooks", "datasets")
RULES = tuple(f"R{number}" for number in range(1, 11))
SCHEMAS = ("MainLoop", "TorchModel", "ModuleModel")
"""Classes whose constructors are schemas of a config, besides the hooks and the datasets."""

_MOST_PARAMETERS = 6
_IDIOMS = ("grad", "data", "requires_grad", "training")
_WRITTEN = ("sys", "os", "torch", "warnings", "progress")


def places(path, text):
    """Yield (rule, line) of each habit in the text of a file; `path` is relative to the root."""
    blocks = [ast.parse(text)]
    for block in blocks:
        if isinstance(block, ast.ClassDef) and path.parts[0] == "emrun" and block.name not in SCHEMAS:
            yield from _long_constructors(block)
        nodes = list(_own(block))
        blocks += [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        yield from _in_block(nodes)


def _long_constructors(cls):
    for function in cls.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__init__":
            parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if len(parameters) - 1 > _MOST_PARAMETERS:  # without self
                yield "R10", function.lineno


def _in_block(nodes):
    """Yield (rule, line) for what a function, a class or a module does itself, which are these nodes."""
    values, made = {}, {"self", "cls"}
    for node in nodes:
        for target in _targets(node):
            if isinstance(target, ast.Name):
                values[target.id] = node.value
                if isinstance(node.value, ast.Call):
                    made.add(target.id)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    if isinstance(one, ast.Name):
                        values[one.id] = value
    for node in nodes:
        for rule in _of_node(node, values, made):
            yield rule, node.lineno


def _own(block):
    """Yield the nodes of a block, without those of functions and classes in it, which are blocks of their own."""
    waiting = list(ast.iter_child_nodes(block))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def _of_node(node, values, made):
    """Yield the rules that a node breaks; `values` are those of the names in its block, `made` the names of objects."""
    match node:
        case ast.Call():
            yield from _of_call(node, values)
        case ast.BinOp(op=ast.Mult()):
            sides = (node.left, node.right)
            if any(map(_is_condition, sides)) and any(map(_is_text_or_list, sides)):
                yield "R7"
        case ast.IfExp():
            if _is_nested(node):
                yield "R8"
        case ast.For(iter=ast.IfExp()) | ast.Expr(value=ast.IfExp() | ast.Tuple()):
            yield "R9"
        case ast.Assign(targets=[ast.Tuple() as left], value=ast.Tuple() | ast.GeneratorExp() as right):
            yield from _of_tuples(left, right)
    for target in _targets(node):
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(each, ast.Attribute) and not _may_set(each, made):
                yield "R5"


def _of_call(call, values):
    for starred in call.args:
        if isinstance(starred, ast.Starred):
            unpacked = starred.value
            packed = values.get(unpacked.id) if isinstance(unpacked, ast.Name) else unpacked
            if isinstance(packed, ast.Tuple) and packed.elts:
                yield "R1"
    for keyword in call.keywords:
        packed = values.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else None
        if keyword.arg is None and isinstance(packed, ast.Dict) and packed.keys:
            yield "R2"
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    sets_computed = name == "setattr" and len(call.args) == 3 and not isinstance(call.args[1], ast.Constant)
    if name == "switched_on" or sets_computed:
        yield "R6"


def _of_tuples(left, right):
    """Yield the rule that a tuple assignment breaks."""
    written = {ast.unparse(each) for each in left.elts}
    values = getattr(right, "elts", [right])
    if written & {ast.unparse(each) for each in values}:  # a swap
        return
    if any("." in each for each in written):
        yield "R3"
    elif not all(isinstance(each, ast.Name | ast.Attribute | ast.Constant) or _is_empty(each) for each in values):
        yield "R4"


def _targets(node):
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, ast.AnnAssign | ast.AugAssign):
        return [node.target]
    return []


def _may_set(attribute, made):
    """Return whether a function sets an attribute of an object that it has made, or as torch's users do."""
    root = ast.unparse(attribute).partition(".")[0]
    is_own = isinstance(attribute.value, ast.Name) and attribute.value.id in made
    return is_own or attribute.attr in _IDIOMS or root in _WRITTEN


def _is_condition(node):
    match node:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Call(func=ast.Name(id="bool" | "isinstance")):
            return True
    return False


def _is_text_or_list(node):
    return isinstance(node, ast.JoinedStr | ast.List) or isinstance(getattr(node, "value", None), str)


def _is_empty(node):
    if isinstance(node, ast.Dict):
        return not node.keys
    return isinstance(node, ast.List | ast.Tuple | ast.Set) and not node.elts


def _is_nested(conditional):
    branches, last = 2, conditional.orelse
    while isinstance(last, ast.IfExp):
        branches, last = branches + 1, last.orelse
    return isinstance(conditional.body, ast.IfExp) or isinstance(conditional.test, ast.IfExp) or branches >= 4


def counted(folders=FOLDERS):
    """Return room -> rule -> its places, as `emrun/loop/batches.py:12`; a room is a package, or a folder of its own."""
    found = {}
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT)
            if any((ROOT / each).is_symlink() for each in (path, *path.parents)):
                continue
            room = "/".join(path.parent.parts[:2]) if path.parts[0] == "emrun" else path.parts[0]
            for rule, line in places(path, file.read_text(encoding="utf-8")):
                found.setdefault(room, {}).setdefault(rule, []).append(f"{path}:{line}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS)
    parser.add_argument("--list", metavar="RULE", choices=RULES, help="print the places of this rule")
    arguments = parser.parse_args()
    rooms = counted(arguments.folders)
    totals = Counter()
    for room, rules in rooms.items():
        counts = {rule: len(rules[rule]) for rule in RULES if rule in rules}
        totals.update(counts)
        print(f"{room:16}", *(f"{rule}: {count}" for rule, count in counts.items()), sep="  ")
        if arguments.list:
            print(*rules.get(arguments.list, ()), sep="\n")
    print(f"{'all':16}", *(f"{rule}: {totals[rule]}" for rule in RULES), sep="  ")


if __name__ == "__main__":
    main()
