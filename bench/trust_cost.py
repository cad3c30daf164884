"""What calls over mutual TLS cost, against signed calls without encryption: CPU of 1,000 samples.

The fleet is that of `loop_overhead`: nothing decodes and nothing trains, so the share of calls is as large as it gets.
Pairs alternate, and the order within a pair does too. Calls over TLS are signed as well, so the figure is an upper
bound for TLS in place of signatures; `signatures` says what those take of it, measured alone.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from loop_overhead import measured
from table import Row

from flotilla_core.trust.calls import CallSigner, CallVerifier
from flotilla_core.trust.certificates import make_certificates
from flotilla_testing.stack import example_model, light_stack

PAIRS = int(os.environ.get("FLOTILLA_BENCH_PAIRS", "10"))
RESPONSE_TOKENS = 512
BAR = 1.05
STUDENT_95 = {9: 1.833}
"""One-sided 95 % quantiles of Student's t, by degrees of freedom."""
CALLS = 20_000


def measure() -> list[Row]:
    """The ratio of both, its upper 95 % bound, and what a signature costs."""
    pairs = [_pair(first_plain=number % 2 == 0) for number in range(PAIRS)]
    ratios = [tls / plain for plain, tls in pairs]
    mean = statistics.mean(ratios)
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    bound = mean + STUDENT_95.get(PAIRS - 1, 2.0) * spread
    plain, tls = (statistics.mean(pair[one] for pair in pairs) for one in (0, 1))
    return [
        Row("CPU per 1,000 samples: signed calls", f"{plain:.3f} s"),
        Row("CPU per 1,000 samples: signed calls over TLS", f"{tls:.3f} s"),
        Row(
            f"ratio, mean of {PAIRS} pairs, and upper 95 % bound",
            f"{mean:.3f}, {bound:.3f}",
            f"<= {BAR}",
            bound <= BAR,
        ),
        Row("CPU of a signature, made and judged", f"{_signature_us():.1f} us"),
    ]


def _pair(*, first_plain: bool) -> tuple[float, float]:
    found = {encrypted: _cpu(encrypted) for encrypted in ((False, True) if first_plain else (True, False))}
    print(f"# plain {found[False]:.3f} s, TLS {found[True]:.3f} s", flush=True)
    return found[False], found[True]


def _cpu(encrypted: bool) -> float:
    """Return the CPU seconds of 1,000 samples, of all processes of a new fleet."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        directory = Path(folder)
        model = example_model(directory, positions=2 * RESPONSE_TOKENS)
        bind: dict[str, Any] = {}
        if encrypted:
            host = make_certificates(directory / "certs", ["127.0.0.1"])[0]
            files = {"certificate_file": "certificate.pem", "key_file": "key.pem", "ca_file": "ca.pem"}
            bind = {"tls": {key: str(host / name) for key, name in files.items()}}
        with light_stack(model, directory, bind=bind, sim={"response_tokens": RESPONSE_TOKENS}) as stack:
            return sum(measured(stack, prompts=64, samples=8).cpu_seconds.values())


def _signature_us() -> float:
    method, address = "/flotilla.generator.v1.GeneratorService/Generate", "127.0.0.1:50051"
    signer, verifier = CallSigner("secret", address), CallVerifier("secret", lambda: frozenset({address}))
    began = time.process_time()
    for _ in range(CALLS):
        assert verifier.refusal(method, signer.sign(method)) is None
    return 1e6 * (time.process_time() - began) / CALLS
