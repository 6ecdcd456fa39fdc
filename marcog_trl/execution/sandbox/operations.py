"""Names of the operations that the judge can ask for, and of the special methods that a handle has for them."""

# operators between objects of the program, and the functions of `operator` for them
BINARY = {
    name: {"and": "and_", "or": "or_"}.get(name, name)
    for name in "add sub mul truediv floordiv mod matmul and or xor lshift rshift".split()
} | {"i" + name: "i" + name for name in "add sub mul truediv floordiv mod pow matmul and or xor".split()}
UNARY = ("neg", "pos", "abs", "invert", "round", "int", "float", "index", "complex", "bytes", "fspath", "reversed")
ORDER = ("lt", "le", "gt", "ge")
SPECIAL = frozenset(
    f"__{name}__"
    for name in (
        *BINARY,
        *(f"r{name}" for name in BINARY if name[0] != "i"),
        *UNARY,
        *ORDER,
        *"pow divmod eq hash bool len iter next contains getitem setitem delitem call str repr format".split(),
        *"enter exit await aiter anext aenter aexit".split(),
    )
)
