import importlib
import pkgutil
import sys

import benchmarks

# A benchmark has a main() without required arguments. Other modules here, such as page writers, are separate scripts.
modules = {
    info.name: module
    for info in pkgutil.iter_modules(benchmarks.__path__)
    if info.name != "__main__" and hasattr(module := importlib.import_module(f"benchmarks.{info.name}"), "main")
}
for name in sys.argv[1:] or modules:
    if name not in modules:
        sys.exit(f"There is no benchmark {name!r}; choose from {', '.join(modules)}.")
    print(f"\n## {name}: {(modules[name].__doc__ or '').strip().splitlines()[0]}\n", flush=True)
    modules[name].main()
