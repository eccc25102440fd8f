"""Several hosts on this machine: network namespaces on one bridge, whose links can be cut and healed.

Everything is in namespaces, the bridge too: nothing of this machine's own network is touched.
"""

import ipaddress
import secrets
import subprocess

LIMIT_S = 10.0  # for one command


class Network:
    """``hosts`` namespaces, each with an address of its own. Needs the right to make them: ``refused`` says whether."""

    def __init__(self, hosts: int, subnet: str = "10.77.0.0/24"):
        mark = secrets.token_hex(3)
        self._bridge = f"mesh-{mark}-bridge"
        self._hosts = [f"mesh-{mark}-{i}" for i in range(hosts)]
        net = ipaddress.ip_network(subnet)
        self.addresses = [str(net[i + 1]) for i in range(hosts)]
        try:
            for name in (self._bridge, *self._hosts):
                _ip("netns", "add", name)
            self._in(self._bridge, "link", "add", "br0", "type", "bridge")
            self._in(self._bridge, "link", "set", "br0", "up")
            for i, (host, address) in enumerate(zip(self._hosts, self.addresses, strict=True)):
                self._in(self._bridge, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", host)
                self._in(self._bridge, "link", "set", f"port{i}", "master", "br0", "up")
                self._in(host, "address", "add", f"{address}/{net.prefixlen}", "dev", "eth0")
                for device in ("eth0", "lo"):
                    self._in(host, "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def inside(self, host: int) -> list[str]:
        """What a command is put behind to run on this host."""
        return ["ip", "netns", "exec", self._hosts[host]]

    def cut(self, host: int) -> None:
        """From all others; its own processes still reach each other."""
        self._in(self._bridge, "link", "set", f"port{host}", "down")

    def heal(self, host: int) -> None:
        self._in(self._bridge, "link", "set", f"port{host}", "up")

    def close(self) -> None:
        for name in (*self._hosts, self._bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=LIMIT_S)

    def _in(self, namespace: str, *arguments: str) -> None:
        _ip("-netns", namespace, *arguments)


def _ip(*arguments: str) -> None:
    """Raises OSError with what ip said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def refused() -> str:
    """Why network namespaces cannot be had here; empty when they can."""
    try:
        Network(1).close()
    except OSError as e:  # also: there is no command `ip`
        return f"no network namespaces here: {e}"
    return ""
