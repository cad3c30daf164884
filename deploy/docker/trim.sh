#!/bin/sh
# Remove from /opt/flotilla what no service loads: tests and headers of libraries, remote file systems and protocols of
# Arrow, and, where binutils are installed, debug symbols. Then compile the rest, because a read-only image never keeps
# what its first start compiles.
# Usage: trim.sh [PATTERN]   (packages that are not compiled, because few starts import them)
set -eu

site=$(echo /opt/flotilla/lib/python3.*/site-packages)
find "$site" -type d \( -name tests -o -name __pycache__ \) -prune -exec rm -rf {} +
rm -rf "$site"/matplotlib/mpl-data/sample_data "$site"/pyarrow/include "$site"/pyarrow/src

if [ -d "$site/pyarrow" ]; then
    find "$site/pyarrow" -type f \( -name '*flight*' -o -name '*.pyx' -o -name '*.pxi' -o -name '*.pxd' \
        -o -name '_s3fs*' -o -name 'libarrow_s3*' -o -name '_gcsfs*' -o -name '_azurefs*' \) -delete
    # A wheel holds no links, so it has one library under three names.
    for library in "$site"/pyarrow/lib*.so.*.*.*; do
        for name in "${library%.*.*}" "${library%.*.*.*}"; do
            if [ -f "$name" ]; then ln -sf "$(basename "$library")" "$name"; fi
        done
    done
fi

# Libraries in *.libs were rewritten by the tool that made their wheel, and do not load when strip moves their parts.
if command -v strip >/dev/null; then
    find "$site" -type f -name '*.so*' -not -path '*.libs/*' -exec strip --strip-unneeded {} +
fi

/opt/flotilla/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash ${1:+-x "$1"} "$site" || true
