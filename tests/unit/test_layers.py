"""The shape of the code, read from the code: who may import whom, and how long things get.

A layer imports from the layers listed for it and from itself. A new module must be given a
layer here, which is the moment to think about where it belongs.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "kvstored": ROOT / "kvstored",
    "kvstored_client": ROOT / "client" / "kvstored_client",
    "kvstored_proto": ROOT / "proto" / "kvstored_proto",
}

MODULE_LINES_MAX = 320
FUNCTION_LINES_MAX = 70

# Which modules make up a layer. A package stands for all that is in it; the longest name wins.
LAYERS = {
    "common": [
        "kvstored",
        "kvstored.errors",
        "kvstored.background",
        "kvstored.keys",
        "kvstored.clock",
        "kvstored.lifetime",
        "kvstored.segment_size",
    ],
    "policy": ["kvstored.policy"],
    "device": ["kvstored.device"],
    "memory": ["kvstored.device.memory", "kvstored.device.inherited"],
    "nodes": ["kvstored.device.numa"],
    "worker words": ["kvstored.device.worker_messages"],
    # A process of its own: the daemon never imports it, since it loads the CUDA driver.
    "device worker": [
        "kvstored.device.cuda",
        "kvstored.device.cuda_chunks",
        "kvstored.device.worker",
        "kvstored.device.worker_memory",
        "kvstored.device.copy_engine",
        "kvstored.device.copy_jobs",
        "kvstored.device.copy_kernel",
        "kvstored.device.copy_methods",
        "kvstored.device.doorbell",
    ],
    "tier words": ["kvstored.tiers.base", "kvstored.tiers.path_wear"],
    "tiers": ["kvstored.tiers"],
    "catalogue": ["kvstored.catalog"],
    "mover": ["kvstored.mover"],
    "store": ["kvstored.store", "kvstored.explain", "kvstored.purge"],
    "tenants": ["kvstored.tenancy"],
    "encryption": ["kvstored.encryption"],
    "audit": ["kvstored.tenancy.audit_log", "kvstored.tenancy.refusal_rate"],
    "recorder": ["kvstored.recorder"],
    "settings": ["kvstored.config"],
    "reporting": ["kvstored.reporting"],
    "rpc": ["kvstored.rpc"],
    "daemon": ["kvstored.daemon", "kvstored.__main__"],
    # Stands alone: the supervisor holds the memory of the tier, so it is small and does nothing else.
    "supervisor": ["kvstored.descriptor_store", "kvstored.supervise", "kvstored.offspring"],
    "testing": ["kvstored.testing"],
    "client": ["kvstored_client"],
    "ctl": ["kvstored_client.ctl"],
    "proto": ["kvstored_proto"],
}

# What a layer may import besides itself. Calls go down; nothing below calls up.
MAY_IMPORT = {
    "common": set(),
    "policy": {"kvstored.keys"},
    "device": {"common"},
    "memory": {"common"},
    "tier words": {"common"},
    "worker words": set(),
    "nodes": set(),
    "device worker": {"nodes", "worker words", "memory", "common", "proto"},  # `memory`: it maps what the daemon made
    "tiers": {"tier words", "device", "memory", "nodes", "worker words", "common", "kvstored_proto.frames"},
    "catalogue": {"policy", "tiers", "tier words", "common"},
    "mover": {"catalogue", "policy", "tiers", "tier words", "memory", "common"},
    # `memory`: copies and hashes between addresses, plain functions that the store runs in threads of its own.
    # `processes`: a lease outlives the daemon as long as its reader does. `scheduling`: where those threads run.
    "store": {
        *("mover", "catalogue", "policy", "tiers", "tier words", "memory", "common", "proto"),
        *("tenants", "kvstored.device.processes", "kvstored.device.scheduling", "worker words"),
    },
    "tenants": {"settings", "common", "kvstored.device.state_directory"},
    "encryption": {"tenants", "tiers", "settings", "reporting", "common"},
    # `tokens`: what one looks like, so that none is on record.
    "audit": {"reporting", "device", "catalogue", "common", "kvstored.tenancy.tokens"},
    "recorder": {"reporting", "device", "catalogue", "policy", "common"},
    "settings": {"common", "reporting", "policy"},
    "reporting": {"settings", "tier words", "common", "proto"},
    "rpc": {
        "encryption",
        "store",
        "tenants",
        "audit",
        "recorder",
        "catalogue",
        "tier words",
        "settings",
        "reporting",
        "common",
        "proto",
        "worker words",
        "kvstored.device.outbox",
    },
    "daemon": set(LAYERS) - {"client", "ctl", "testing", "device worker"},
    "supervisor": set(),
    "testing": set(LAYERS),
    "client": {"proto"},
    "ctl": {"client", "proto", "policy"},
    "proto": set(),
}

# Libraries that belong to some layers only: what they do has one home. Test doubles may use any.
HOME_OF = {
    "mmap": {"device", "memory", "device worker", "client", "testing"},
    "numpy": {"device worker", "client", "proto", "testing"},
    "xxhash": {"memory", "client", "ctl", "testing"},
    "lmdb": {"tiers", "testing"},
    "grpc": {"rpc", "daemon", "client", "ctl", "proto", "testing"},
    "uvloop": {"daemon", "testing"},
}
# Policies are pure: the same code runs in the simulator.
NOT_IN_POLICY = {"asyncio", "datetime", "os", "pathlib", "random", "socket", "threading", "time"}


def modules():
    """Name, path and syntax tree of every module that people wrote."""
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                parts = (package, *path.relative_to(folder).with_suffix("").parts)
                name = ".".join(parts).removesuffix(".__init__")
                yield name, path, ast.parse(path.read_text())


def is_module(name):
    package, _, rest = name.partition(".")
    path = SOURCES[package] / rest.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(tree):
    """Names of all modules imported anywhere in a tree; `from package import module` names the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                ours = node.module.partition(".")[0] in SOURCES
                yield inner if ours and is_module(inner) else node.module


def layer_of(name):
    """The layer of a module, or None where it was given none."""
    while name:
        for layer, members in LAYERS.items():
            if name in members and (name != "kvstored" or layer == "common"):
                return layer
        name = name.rpartition(".")[0]
        if name == "kvstored":  # the root package holds no modules by itself
            return None
    return None


def wrong_imports(name, tree):
    """What a module imports and may not."""
    layer = layer_of(name)
    for imported in imports(tree):
        package = imported.partition(".")[0]
        if package in SOURCES:
            target = layer_of(imported)
            if target != layer and target not in MAY_IMPORT[layer] and imported not in MAY_IMPORT[layer]:
                yield f"{name} ({layer}) imports {imported} ({target})"
        elif layer not in HOME_OF.get(package, {layer}) or (layer == "policy" and package in NOT_IN_POLICY):
            yield f"{name} ({layer}) imports {package}"


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def undocumented(name, tree):
    """Public modules, classes, functions and methods without a docstring; names of tests say it all."""
    if not ast.get_docstring(tree):
        yield name
    todo = [(name, node) for node in tree.body]
    while todo:
        outer, node = todo.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            ("_", "test_")
        ):
            overload = any(
                ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in node.decorator_list
            )
            if not overload and not ast.get_docstring(node):
                yield f"{outer}.{node.name}"
            if isinstance(node, ast.ClassDef):
                todo += [(f"{outer}.{node.name}", inner) for inner in node.body]


def too_long(name, source, tree):
    """Modules and functions over the limits."""
    lines = len(source.splitlines())
    if lines > MODULE_LINES_MAX:
        yield f"{name}: {lines} lines, {MODULE_LINES_MAX} are allowed"
    for function in functions(tree):
        lines = function.end_lineno - function.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{name}.{function.name}: {lines} lines, {FUNCTION_LINES_MAX} are allowed"


# ---- the code keeps the rules ----


def none_of(found):
    found = list(found)
    assert not found, "\n" + "\n".join(found)


def test_every_module_has_a_layer():
    none_of(name for name, _, _ in modules() if layer_of(name) is None)


def test_imports_go_down_only():
    none_of(wrong for name, _, tree in modules() if layer_of(name) for wrong in wrong_imports(name, tree))


def test_no_policy_awaits():
    assert not any(
        isinstance(node, ast.AsyncFunctionDef | ast.Await)
        for name, _, tree in modules()
        if layer_of(name) == "policy"
        for node in ast.walk(tree)
    )


def test_modules_and_functions_can_be_seen_whole():
    none_of(long for name, path, tree in modules() for long in too_long(name, path.read_text(), tree))


def test_what_is_public_is_documented():
    none_of(missing for name, _, tree in modules() for missing in undocumented(name, tree))


# ---- the rules can be broken ----


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("kvstored.policy.eviction", "from kvstored.clock import Clock"),
        ("kvstored.policy.eviction", "import time"),
        ("kvstored.tiers.dram", "from kvstored.policy.eviction import Node"),
        ("kvstored.tiers.dram", "from kvstored import catalog"),
        ("kvstored.device.memory", "def f():\n    from kvstored.tiers import base"),
        ("kvstored.store.store", "from kvstored.device.file import FileDevice"),
        ("kvstored.store.store", "from kvstored.rpc.session import Session"),
        ("kvstored.rpc.session", "from kvstored.device import memory"),
        ("kvstored.rpc.session", "import kvstored.tiers.dram"),
        ("kvstored.mover.mover", "from kvstored.store.store import Store"),
        ("kvstored.catalog.catalog", "import kvstored.testing"),
        ("kvstored.tiers.dram", "import mmap"),
        ("kvstored_client.client", "from kvstored.keys import Namespace"),
        ("kvstored_client.client", "from kvstored.policy import eviction"),
        ("kvstored_proto.frames", "import kvstored_client"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(name, code):
    assert len(list(wrong_imports(name, ast.parse(code)))) == 1


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("kvstored.policy.quota", "from kvstored.keys import slot_bytes"),
        ("kvstored.tiers.dram", "from kvstored.device import memory"),
        ("kvstored.store.store", "from kvstored.device import memory"),
        ("kvstored.daemon.daemon", "from kvstored.rpc import session"),
        ("kvstored_client.ctl.replay", "from kvstored.policy import eviction"),
    ],
)
def test_an_import_in_the_right_direction_is_allowed(name, code):
    assert list(wrong_imports(name, ast.parse(code))) == []


def test_a_module_without_a_layer_is_found():
    assert layer_of("kvstored.brand_new") is None
    assert layer_of("kvstored.tiers.brand_new") == "tiers"


def test_what_is_too_long_is_found():
    source = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX + "y = 1\n" * MODULE_LINES_MAX
    assert len(list(too_long("m", source, ast.parse(source)))) == 2


def test_what_is_undocumented_is_found():
    source = '"""M."""\nclass A:\n    """A."""\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...\n'
    assert sorted(undocumented("m", ast.parse(source))) == ["m.A.f", "m.h"]
    assert list(undocumented("m", ast.parse(""))) == ["m"]
