"""The formats of texts that JSON Schema names, by the documents that it refers to.

Invariants: a text is judged by its characters alone, in time linear in its length, except for `regex`. What a format
allows in other scripts (`idn-email`, `iri`) is another format, and unknown here. Digits are those of ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from ipaddress import IPv4Address, IPv6Address

DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
TIME = re.compile(
    r"([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9]|60)(?:\.[0-9]+)?(?:[Zz]|([+-])([01][0-9]|2[0-3]):([0-5][0-9]))"
)
OF_DAYS = r"(?:[0-9]+Y)?(?:[0-9]+M)?(?:[0-9]+D)?"
OF_HOURS = r"T(?=[0-9])(?:[0-9]+H)?(?:[0-9]+M)?(?:[0-9]+(?:\.[0-9]+)?S)?"
DURATION = re.compile(rf"P(?:[0-9]+W|(?=[0-9T]){OF_DAYS}(?:{OF_HOURS})?)")
UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
LOCAL = re.compile(rf'{ATOM}(?:\.{ATOM})*|"(?:[^"\\\x00-\x1f\x7f-\U0010ffff]|\\[ -~])*"')
# RFC 3986: scheme, authority, then path, query and fragment.
CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
HOST = r"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
USER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*"
AUTHORITY = rf"//(?:{USER}@)?(?:\[(?P<address>[^\]]*)\]|{HOST})(?::[0-9]*)?(?=[/?#]|\Z)"
REFERENCE = re.compile(
    rf"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):)?(?:{AUTHORITY}|(?!//))"
    rf"{CHARACTER}*(?:\?(?:{CHARACTER}|\?)*)?(?:\#(?:{CHARACTER}|\?)*)?"
)
POINTER = re.compile(r"(?:/(?:[^/~]|~[01])*)*")


def is_date(text: str) -> bool:
    found = DATE.fullmatch(text)
    if found is None:
        return False
    try:
        date(*map(int, found.groups()))
    except ValueError:
        return False
    return True


def is_time(text: str) -> bool:
    found = TIME.fullmatch(text)
    if found is None:
        return False
    hour, minute, second, sign, hours, minutes = found.groups()
    if second != "60":
        return True
    # A leap second is the last one of a day of UTC.
    offset = (int(hours) * 60 + int(minutes)) * (-1 if sign == "+" else 1) if sign else 0
    return (int(hour) * 60 + int(minute) + offset) % 1440 == 1439


def is_date_time(text: str) -> bool:
    return is_date(text[:10]) and text[10:11] in ("T", "t") and is_time(text[11:])


def is_hostname(text: str) -> bool:
    return len(text) <= 253 and all(LABEL.fullmatch(label) for label in text.split("."))


def is_email(text: str) -> bool:
    local, _, domain = text.rpartition("@")
    if len(local) > 64 or not LOCAL.fullmatch(local):
        return False
    if domain.startswith("[") and domain.endswith("]"):
        return is_ipv4(domain[1:-1]) or (domain[1:6].lower() == "ipv6:" and is_ipv6(domain[6:-1]))
    return is_hostname(domain)


def is_ipv4(text: str) -> bool:
    return _is_address(IPv4Address, text)


def is_ipv6(text: str) -> bool:
    return "%" not in text and _is_address(IPv6Address, text)


def _is_address(kind: Callable[[str], object], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def is_uri_reference(text: str) -> bool:
    return _reference(text) is not None


def is_uri(text: str) -> bool:
    found = _reference(text)
    return found is not None and found["scheme"] is not None


def _reference(text: str) -> re.Match[str] | None:
    found = REFERENCE.fullmatch(text)
    address = found["address"] if found else None
    return None if address is not None and not is_ipv6(address) else found


def is_regex(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


FORMATS: dict[str, Callable[[str], bool]] = {
    "date": is_date,
    "time": is_time,
    "date-time": is_date_time,
    "duration": lambda text: DURATION.fullmatch(text) is not None,
    "email": is_email,
    "hostname": is_hostname,
    "ipv4": is_ipv4,
    "ipv6": is_ipv6,
    "uri": is_uri,
    "uri-reference": is_uri_reference,
    "uuid": lambda text: UUID.fullmatch(text) is not None,
    "json-pointer": lambda text: POINTER.fullmatch(text) is not None,
    "regex": is_regex,
}
