"""What a release is made of, in order."""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """``commands``: of bash, run in the clone (or, not ``in_clone``, in this checkout), with COMMIT, VERSION, and the
    folders ORIGIN (this checkout), RELEASE, CLONE and DIST. They may be run again. ``needs``: programs."""

    name: str
    what: str
    commands: str
    needs: tuple[str, ...] = ()
    in_clone: bool = True


ARM_CXX = "aarch64-linux-gnu-g++"

STEPS = (
    Step(
        "clone",
        "the commit, and nothing that lies around here",
        'rm -rf "$CLONE" "$DIST"\n'
        'mkdir -p "$DIST"\n'
        'git clone --quiet --no-checkout "$ORIGIN" "$CLONE"\n'
        'git -C "$CLONE" checkout --quiet --detach "$COMMIT"',
        ("git",),
        in_clone=False,
    ),
    Step(
        "notes",
        "CHANGELOG.md's section of the version",
        'scripts/releasing/release_notes "v$VERSION" >"$DIST/NOTES.md"',
    ),
    Step("lock", "the clone's own .venv, by the lock's exact versions and hashes", "bash scripts/setup --locked dev"),
    Step("tests", "lint, types and all quick tests", "bash scripts/test"),
    Step("slow", "the tests that take minutes", "bash scripts/test --slow"),
    Step(
        "sanitized",
        "the native library's tests with checks of addresses and undefined behaviour",
        'PATH="$PWD/.venv/bin:$PATH" bash scripts/testing/sanitized',
        ("g++",),
    ),
    Step(
        "arm",
        "the native library's ops for ARM under qemu",
        "bash scripts/testing/arm",
        (ARM_CXX, "qemu-aarch64-static"),
    ),
    Step(
        "docs",
        "the documentation as a site, each link checked",
        'bash scripts/docs\nrm -rf "$DIST/site"\ncp -r build/site "$DIST/site"',
    ),
    Step(
        "wheel",
        "for x86-64, with the oldest C library that auditwheel finds it to need",
        'rm -rf dist\nbash scripts/wheel/build_wheel\ncp dist/toolkit-*.whl "$DIST"',
        ("g++",),
    ),
    Step(
        "arm_wheel",
        "the same for aarch64, cross-compiled",
        f"rm -rf dist\nCXX={ARM_CXX} _PYTHON_HOST_PLATFORM=linux-aarch64 bash scripts/wheel/build_wheel\n"
        'cp dist/toolkit-*aarch64.whl "$DIST"',
        (ARM_CXX,),
    ),
    Step(
        "sdist",
        "the source distribution; a wheel made of it holds what the other one does",
        "bash scripts/wheel/sdist",
        ("g++",),
    ),
    Step(
        "try",
        "the wheel in empty environments of each Python: a converted model answers within a minute",
        'rm -rf dist && mkdir dist && cp "$DIST"/toolkit-*x86_64.whl dist\n'
        '[ -e "$RELEASE/engine" ] || .venv/bin/tool convert demo --dst-path "$RELEASE/engine"\n'
        'mapfile -t pythons < <(compgen -c python3. | grep -xE "python3\\.[0-9]+" | sort -u)\n'
        'for python in "${pythons[@]}"; do\n'
        '    "$python" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || continue\n'
        '    timeout 600 bash scripts/wheel/try_wheel "$RELEASE/engine" "$python"\n'
        "done",
    ),
    Step(
        "debian",
        "the same in a bare Debian (as root)",
        'bash scripts/wheel/try_wheel "$RELEASE/engine" --debian trixie',
        ("debootstrap",),
    ),
    Step(
        "sbom",
        "what `pip install 'toolkit[all]'` brings, as CycloneDX",
        "env=build/wheel-env\n"
        '[ -x "$env/bin/pip" ] || python3 -m venv "$env"\n'
        '"$env/bin/pip" install --quiet cyclonedx-bom\n'
        "python3 scripts/locked.py all >build/locked.txt\n"
        '"$env/bin/cyclonedx-py" requirements build/locked.txt --pyproject pyproject.toml --output-reproducible \\\n'
        '    --output-format JSON --output-file "$DIST/toolkit-$VERSION.cdx.json"',
    ),
    Step(
        "checksums",
        "SHA-256 of each file",
        'cd "$DIST"\n'
        'find . -maxdepth 1 -type f ! -name SHA256SUMS -printf "%P\\0" | sort -z | xargs -0 sha256sum >SHA256SUMS',
    ),
    Step(
        "tag",
        "the annotated tag, here; push it when all is well",
        'git tag --annotate "v$VERSION" --file "$DIST/NOTES.md" --cleanup=verbatim "$COMMIT"',
        ("git",),
        in_clone=False,
    ),
)
