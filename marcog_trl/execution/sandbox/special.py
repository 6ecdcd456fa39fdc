"""Names of special methods, grouped by how a stand-in forwards them to the program's process."""

UNARY = ("neg", "pos", "abs", "invert", "trunc", "floor", "ceil")
BINARY = tuple("add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split())
REFLECTED = tuple("r" + name for name in BINARY)
IN_PLACE = tuple("i" + name for name in BINARY if name != "divmod")
ORDER = ("lt", "le", "gt", "ge")
NUMBERS = {"int": int, "index": int, "float": float, "complex": complex}
OTHERS = tuple(
    "eq ne hash bool len iter next reversed contains getitem setitem delitem class_getitem call str repr format bytes "
    "fspath round enter exit await aiter anext aenter aexit".split()
)
SPECIAL = {f"__{name}__": name for name in (*UNARY, *BINARY, *REFLECTED, *IN_PLACE, *ORDER, *NUMBERS, *OTHERS)}

# Libraries trust these when they read memory, compare, copy or count. So they are out of reach for the tests.
HOOKS = frozenset(
    "__array__ __array_function__ __array_interface__ __array_struct__ __array_ufunc__ __array_wrap__ __array_priority__ "
    "__buffer__ __dlpack__ __cuda_array_interface__ __getstate__ __getnewargs__ __getnewargs_ex__ __reduce__ __length_hint__ "
    "__instancecheck__ __subclasscheck__ __subclasshook__ __set_name__ __get__ __set__ __delete__ __getattribute__ "
    "__mro_entries__ __prepare__ __sizeof__".split()
)
