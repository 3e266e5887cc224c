"""Who may use the daemon, as of this moment: the one place that is asked at run time.

The configuration is where it begins; an admin may change it while the daemon serves. So nobody keeps a
tenant for longer than a call: whoever derives something from one (quotas, identities) derives it anew
when `watch` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView

from kvstored.config.tenants import Tenant, check_disjoint
from kvstored.tenancy.merge import Change, Changes, Check, Merged, merge, origin_of
from kvstored.tenancy.tokens import Token

Watcher = Callable[[str], None]


class Tenants:
    """The tenants by name. Plain state of the event loop."""

    def __init__(
        self, configured: Iterable[Tenant] = (), changes: Changes | None = None, check: Check = check_disjoint
    ) -> None:
        """`changes`: what admins made of what is configured; `check` raises ValueError for tenants that cannot be.

        Raises InvalidArgument where both do not go together.
        """
        self.configured = {tenant.name: tenant for tenant in configured}
        self.changes = changes or Changes()
        self._merged = merge(list(self.configured.values()), self.changes, check=check)
        self._check = check
        self._by_name = dict(self._merged.tenants)
        self._watchers: list[Watcher] = []

    # ---- asked at run time ----

    def get(self, name: str) -> Tenant | None:
        """The tenant of this name; None where there is none, or none any more."""
        return self._by_name.get(name)

    @property
    def names(self) -> KeysView[str]:
        """A live view of all names."""
        return self._by_name.keys()

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def is_leaving(self, name: str) -> bool:
        """Whether a tenant was removed and is still being taken away."""
        return name in self.changes.leaving

    def token(self, token_id: str) -> Token | None:
        """A token of one of them, by its id."""
        return self._merged.tokens.get(token_id)

    @property
    def tokens(self) -> list[Token]:
        """All tokens that were made at run time."""
        return list(self._merged.tokens.values())

    @property
    def warnings(self) -> list[str]:
        """What `status` is to say about them."""
        return self._merged.warnings

    @property
    def without_configuration(self) -> list[str]:
        """Names of tenants that went with the configuration, and of which changes or tokens are left."""
        return self._merged.without_configuration

    def origin(self, name: str, field: str) -> str:
        """Where a field of a tenant comes from: the configuration, an admin, or nowhere."""
        return origin_of(field, self.configured.get(name), self.changes.tenants.get(name))

    def watch(self, callback: Watcher) -> None:
        """Call `callback` with the name of every tenant that was added, changed or removed, or has other tokens.

        On the loop, when all of the change is in force.
        """
        self._watchers.append(callback)

    # ---- changed at run time ----

    def merged_with(self, changes: Changes) -> Merged:
        """What these changes would make of what is configured. Raises InvalidArgument."""
        return merge(list(self.configured.values()), changes, self._merged, self._check)

    def become(self, changes: Changes) -> list[str]:
        """From now on these are the changes; tells who watches, and returns the names of tenants that differ."""
        before, after = self._merged, self.merged_with(changes)
        self.changes, self._merged = changes, after
        self._by_name.clear()  # in place: `names` is a view of it
        self._by_name.update(after.tenants)
        differ = [n for n in {**before.tenants, **after.tenants} if before.tenants.get(n) != after.tenants.get(n)]
        for token_id in before.tokens.keys() | after.tokens.keys():
            old, new = before.tokens.get(token_id), after.tokens.get(token_id)
            if old != new:
                differ += [token.tenant for token in (old, new) if token is not None]
        changed = list(dict.fromkeys(differ))
        for name in changed:
            for callback in self._watchers:
                callback(name)
        return changed


def changed_tenant(tenants: Tenants, name: str) -> Change:
    """What admins made of one tenant so far."""
    return tenants.changes.tenants.get(name, Change(name))
