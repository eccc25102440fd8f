"""Which addresses this machine has, and by which of them it reaches another."""

import ipaddress
import socket

import psutil

_ANYWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}  # documentation networks: a default route


def is_loopback(host: str) -> bool:
    """Whether ``host`` is an IP address of the loopback."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def resolve(host: str) -> list[str]:
    """The IP addresses of ``host``, in the resolver's order; itself when it is one. Raises ValueError. Blocks as long
    as the resolver takes."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise ValueError(f"host {host} cannot be resolved: {getattr(e, 'strerror', None) or e}") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def towards(ip: str) -> str | None:
    """The local address of the route to ``ip``; None when there is no route. Sends nothing."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        target = socket.getaddrinfo(ip, 9, family, socket.SOCK_DGRAM, 0, socket.AI_NUMERICHOST)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            local = str(probe.getsockname()[0])
    except OSError:
        return None
    scope = ip.partition("%")[2]
    return f"{local}%{scope}" if scope and "%" not in local else local


def default() -> str | None:
    """The address of the default route, else the only other one that is not loopback; None when there is none."""
    for ip in _ANYWHERE.values():
        if (found := towards(ip)) and not is_loopback(found):
            return found
    others = [ip for ips in interfaces().values() for ip in ips if not is_loopback(ip) and "%" not in ip]
    return others[0] if len(others) == 1 else None


def interfaces() -> dict[str, list[str]]:
    """The IP addresses of each interface that is up: IPv4 first, link-local IPv6 last and with its scope."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        ips = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        if name in up and ips:
            found[name] = sorted(ips, key=lambda ip: (":" in ip, "%" in ip))
    return found


def interface_of(ip: str) -> str:
    """The name of the interface that has this address; empty when none has."""
    return next((name for name, ips in interfaces().items() if ip in ips), "")


def listing() -> str:
    """The interfaces that others may reach, in one line for an error."""
    there = {name: [ip for ip in ips if not is_loopback(ip)] for name, ips in interfaces().items()}
    return "; ".join(f"{name} {', '.join(ips)}" for name, ips in there.items() if ips) or "only the loopback"
