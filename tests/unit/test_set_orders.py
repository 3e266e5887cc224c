"""What the store does never goes in the order of a set: that of texts and objects is another one in every process.

So a run that went wrong, and each world of the simulation (`tests/sim`), can be had again. Sets are for asking what
is in them; whoever goes through one sorts it, or takes a dict, which has the order in which its keys came.

Sets are known by how they are made and by their annotations, as far as that can be read.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvstored"
SIMULATED = ("catalog", "encryption", "explain", "mover", "policy", "purge", "store", "tiers")
SETS = ("set", "frozenset")
MAKE_SETS = ("difference", "intersection", "symmetric_difference", "union")
WITHOUT_ORDER = (*SETS, "all", "any", "Counter", "len", "max", "min", "sorted", "sum")
IN_ORDER = ("enumerate", "iter", "list", "map", "next", "tuple")
NUMBERED = "futures and tasks: those of a virtual loop have numbers"
NUMBERS = "numbers are their own hashes"
KNOWN = {  # what is gone through all the same, and why it may
    "self._asked": NUMBERED,
    "self._tasks": NUMBERED,
    "left": NUMBERED,
    "leased.keys() & taken.keys()": NUMBERS,
    "numbers.intersection(rule.past)": NUMBERS,
    "session.exposed.intersection(segment_ids)": NUMBERS,
    "set(kept.segment_ids) - {s.segment_id for s in self._adoption.segments}": NUMBERS,
    "set(needed) - worker.sent_segments": NUMBERS,
    "{first >> 20 for first, _ in runs}": NUMBERS,
    "{slot >> 20 for lease in leases for slot, _ in lease.runs} - session.exposed": NUMBERS,
}


def is_set_type(annotation):
    text = ast.unparse(annotation)
    return text.startswith(("set[", "frozenset[")) and text not in ("set[int]", "frozenset[int]")


class Sets:
    """The names of all that is a set, by its annotation or by what is assigned to it."""

    def __init__(self, trees):
        nodes = [node for tree in trees for node in ast.walk(tree)]
        fields = [node for node in nodes if isinstance(node, ast.AnnAssign) and is_set_type(node.annotation)]
        self.attributes = {ast.unparse(node.target).rsplit(".")[-1] for node in fields}
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.functions = {node.name for node in functions if node.returns and is_set_type(node.returns)}
        self.local = set()

    def enter(self, function):
        arguments = [*function.args.args, *function.args.kwonlyargs]
        self.local = {each.arg for each in arguments if each.annotation and is_set_type(each.annotation)}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and self.has(node.value):
                self.local.update(target.id for target in node.targets if isinstance(target, ast.Name))

    def has(self, node):
        """Whether this is a set, or has its order."""
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Name():
                return node.id in self.local
            case ast.Attribute():
                return node.attr in self.attributes
            case ast.Await():
                return self.has(node.value)
            case ast.IfExp():
                return self.has(node.body) or self.has(node.orelse)
            case ast.GeneratorExp() | ast.ListComp() | ast.DictComp():
                return any(self.has(each.iter) for each in node.generators)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor() | ast.Sub()):
                return any(self.has(side) or ast.unparse(side).endswith(".keys()") for side in (node.left, node.right))
            case ast.Call(func=ast.Name(id=name)):
                return name in (*SETS, *self.functions) or (name in IN_ORDER and any(map(self.has, node.args)))
            case ast.Call(func=ast.Attribute(attr=name)):
                return name in (*MAKE_SETS, *self.functions) or (name == "fromkeys" and any(map(self.has, node.args)))
        return False


def gone_through(function):
    """Whatever is taken piece by piece here, but for what only counts or sorts it."""
    inner = set()
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in WITHOUT_ORDER:
                inner.update(node.args)
            case ast.For() | ast.AsyncFor():
                yield node.iter
            case ast.ListComp() | ast.DictComp() | ast.GeneratorExp() if node not in inner:
                yield from (each.iter for each in node.generators)
            case ast.Call(func=ast.Name(id=name)) if name in IN_ORDER and node not in inner:
                yield from node.args
            case ast.Call(func=ast.Attribute(attr="fromkeys")):
                yield node.args[0]
            case ast.Call(func=ast.Attribute(attr="pop"), args=[]):
                yield node.func.value
            case ast.Starred():
                yield node.value


def found_in(trees):
    sets = Sets(trees.values())
    for name, tree in trees.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                sets.enter(function)
                yield from ((name, ast.unparse(each)) for each in gone_through(function) if sets.has(each))


def parsed():
    files = [path for part in SIMULATED for path in (PACKAGE / part).glob("*.py")] + [*PACKAGE.glob("*.py")]
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(files)}


def test_nothing_goes_through_a_set():
    found = list(found_in(parsed()))
    assert [each for each in found if each[1] not in KNOWN] == []
    assert {text for _, text in found} == KNOWN.keys(), "what is known is there still"


def test_no_dict_holds_sets_of_objects():
    """Those would be gone through under names of which this knows nothing."""
    for name, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and "dict[" in (text := ast.unparse(node.annotation)):
                for inside in text.split("set[")[1:]:
                    assert inside.split("]")[0] in ("bytes", "int", "str"), f"{name}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "code",
    [
        "for each in {a, b}: each()",
        "return [each for each in set(a)]",
        "for each in list(self.members): each()",
        "return dict.fromkeys(a.keys() & b)",
        "some = set(a)\n    for each in some: each()",
        "return self.members.pop()",
        "return [*self.members]",
    ],
)
def test_each_of_these_would_be_found(code):
    tree = ast.parse(f"class A:\n  members: set[A]\n  def f(self, a, b):\n    {code}")
    assert list(found_in({"a": tree}))


@pytest.mark.parametrize("code", ["return sorted(set(a))", "return a in self.members", "return any(x for x in {a, b})"])
def test_none_of_these_is_found(code):
    tree = ast.parse(f"class A:\n  members: set[A]\n  def f(self, a, b):\n    {code}")
    assert not list(found_in({"a": tree}))
