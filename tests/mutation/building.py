"""Builds mutants.

All sources are copied once into a folder of their own, and built there without link-time
optimisation. For a mutant only what its file is part of is compiled again, by the commands of that
build, and the programs are linked with it. Nothing is written into the source tree.
"""

import hashlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = {
    "unit": "turnstile_unit_tests",
    "scenarios": "turnstile_simulator_tests",
    "simulator": "turnstile_simulator",
    "module": "turnstile",
}
INTEGRATION = "turnstile_integration_tests"
# What the programs have besides the tests that run here: nobody waits for it to be compiled.
NOT_NEEDED = {
    "unit": ("/checker/", "libturnstile_checker.a"),
    "scenarios": ("/simulator_test.cc.o", "_world.dir/simulator.cc.o", "_world.dir/server.cc.o",
                  "libturnstile_checker.a"),
}


class DoesNotCompile(Exception):
    pass


class Command:
    """A command of the build, as a list of words."""

    def __init__(self, text):
        words = shlex.split(text)
        # CMake wraps some: ": && c++ ... && :"
        while "&&" in words:
            at = words.index("&&")
            words = words[at + 1:] if words[0] == ":" or at < 3 else words[:at]
        self.words = words

    @property
    def output(self):
        return self.words[self.words.index("-o") + 1]

    def compile(self, source, output, folder):
        """The words that compile `source` instead, with the headers in `folder` before ours."""
        words, rest = [self.words[0], f"-I{folder}"], iter(self.words[1:])
        for word in rest:
            if word in ("-o", "-MT", "-MF", "-c"):
                next(rest)
            elif word != "-MD":
                words.append(word)
        return words + ["-o", str(output), "-c", str(source)]

    def link(self, objects, output, left_out=()):
        """The words that link with other objects, {name in the build: file}, and without some. One
        that would come out of an archive is put in front of it."""
        words = [word for word in self.words if word not in left_out]
        words[words.index("-o") + 1] = str(output)
        words = [word for word in words if not word.startswith("-Wl,--dependency-file")]
        first = []
        for name, file in objects.items():
            if name in words:
                words[words.index(name)] = str(file)
            else:
                first.append(str(file))
        at = next(i for i, word in enumerate(words) if word.endswith(".o"))
        return words[:at] + first + words[at:]


class Build:
    """The programs without a mutant, and how to make them with one."""

    def __init__(self, folder, jobs):
        self.folder = folder
        self.jobs = jobs
        self.source = folder / "source"
        self.base = folder / "base"

    def prepare(self):
        if not (self.base / "build.ninja").exists():
            self.call(["cmake", "-S", self.source, "-B", self.base, "-G", "Ninja",
                       "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF",
                       "-DCMAKE_CXX_FLAGS=-w", f"-DREDISMODULE_INCLUDE_DIR={ROOT / '.sdk'}"])
        self.call(["cmake", "--build", self.base, "--parallel", str(self.jobs), "--target",
                   *TARGETS.values(), INTEGRATION])
        database = json.loads((self.base / "compile_commands.json").read_text(encoding="utf-8"))
        self.compilations = {}
        for entry in database:
            command = Command(entry["command"])
            self.compilations[command.output] = command, entry["file"]
        self.links = {name: Command(self.ninja("-t", "commands", target).splitlines()[-1])
                      for name, target in TARGETS.items()}
        for name, parts in NOT_NEEDED.items():
            link = self.links[name]
            link.words = [word for word in link.words if not any(part in word for part in parts)]
        self.includes = self.read_includes()

    def program(self, name):
        return self.base / self.links[name].output

    @property
    def integration(self):
        return self.base / "tests" / INTEGRATION

    def fingerprint(self):
        """What the module and its integration tests are, as one short text."""
        digest = hashlib.sha256()
        for folder in ("module", "tests/integration", "tests/support"):
            for path in sorted((self.source / folder).rglob("*.*")):
                digest.update(str(path).encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    @staticmethod
    def listed():
        output = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, check=True,
            stdout=subprocess.PIPE, text=True).stdout
        return sorted(name for name in set(output.split("\0")) if name and (ROOT / name).is_file())

    def copy_sources(self):
        """What has not changed keeps its time, and is not built again."""
        names = self.listed()
        self.source.mkdir(parents=True, exist_ok=True)
        for old in [path for path in self.source.rglob("*") if path.is_file()]:
            if str(old.relative_to(self.source)) not in set(names):
                old.unlink()
        for name in names:
            old, new = self.source / name, ROOT / name
            if not old.exists() or old.read_bytes() != new.read_bytes():
                old.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(new, old)
                shutil.copymode(new, old)

    @staticmethod
    def call(words):
        done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise SystemExit(f"mutation: {shlex.join(str(word) for word in words)}\n"
                             f"{done.stdout[-4000:]}")

    def ninja(self, *words):
        return subprocess.run(["ninja", "-C", self.base, *words], check=True, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout

    def read_includes(self):
        """{object: the files of ours that it is made of}."""
        found, name = {}, None
        for line in self.ninja("-t", "deps").splitlines():
            if line and not line[0].isspace():
                name = line.split(": #deps")[0]
                found[name] = set()
            elif name and line.strip():
                path = os.path.normpath(os.path.join(self.base, line.strip()))
                if path.startswith(str(self.source) + os.sep):
                    found[name].add(os.path.relpath(path, self.source))
        return found

    def objects_of(self, file, program):
        """The objects of a program, or of what it is linked with, that a file is part of."""
        words = set(self.links[program].words)
        archives = tuple(f"{folder}CMakeFiles/{library}.dir/"
                         for folder, library in self.libraries(program))
        return [name for name in sorted(self.compilations)
                if file in self.includes.get(name, ()) and
                (name in words or name.startswith(archives))]

    def other_unit_tests(self, file):
        """The objects of all unit tests but that of the unit that a file belongs to; nothing if that
        has none."""
        own = f"/{pathlib.PurePath(file).stem}_test.cc.o"
        tests = [word for word in self.links["unit"].words if word.endswith("_test.cc.o")]
        others = [name for name in tests if not name.endswith(own)]
        return others if len(others) < len(tests) else []

    def libraries(self, program):
        """The archives that a program is linked with, as (folder, name)."""
        for word in self.links[program].words:
            folder, name = os.path.split(word)
            if name.startswith("lib") and name.endswith(".a") and not folder.startswith("/"):
                yield (folder + "/" if folder else ""), name[3:-2]


class MutantBuild:
    """One mutant in a folder of its own. What is compiled is kept until it is closed."""

    def __init__(self, build, mutant, source, folder, run):
        self.build = build
        self.mutant = mutant
        self.folder = folder
        self.run = run  # words, limit: (exit status, output)
        self.objects = {}
        self.same = {}  # whether an object is what it is without the mutant
        self.file = folder / mutant.file
        shutil.rmtree(folder, ignore_errors=True)
        self.file.parent.mkdir(parents=True)
        self.file.write_text(mutant.apply(source), encoding="utf-8")

    def compile(self, name):
        if name in self.objects:
            return
        command, source = self.build.compilations[name]
        if os.path.relpath(source, self.build.source) == self.mutant.file:
            source = self.file
        output = self.folder / "objects" / name
        output.parent.mkdir(parents=True, exist_ok=True)
        status, text = self.run(command.compile(source, output, self.folder / "module"), 300)
        if status != 0:
            if status is None or "error:" not in text:
                raise RuntimeError(f"{self.mutant.id}: the compiler ends with {status}\n{text}")
            raise DoesNotCompile(next(line for line in text.splitlines() if "error:" in line))
        self.objects[name] = output
        self.same[name] = output.read_bytes() == (self.build.base / name).read_bytes()

    def is_same(self, program):
        """Whether none of its objects differs. Compiles them."""
        names = self.build.objects_of(self.mutant.file, program)
        if not names:
            return True
        for name in names:
            self.compile(name)
        return all(self.same[name] for name in names)

    def link(self, program, left_out=()):
        names = [name for name in self.build.objects_of(self.mutant.file, program)
                 if name not in left_out]
        for name in names:
            self.compile(name)
        output = self.folder / os.path.basename(self.build.links[program].output)
        words = self.build.links[program].link(
            {name: self.objects[name] for name in names}, output, left_out)
        status, text = self.run(words, 300)
        if status != 0:
            raise DoesNotCompile(text.strip().splitlines()[-1] if text.strip() else "does not link")
        return output

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)
