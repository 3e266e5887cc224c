"""The tiers' own settings, out of the configuration and the tenants."""

from __future__ import annotations

from collections.abc import Callable

from kvstored.config.config import Config
from kvstored.config.schema import Tenant
from kvstored.device import numa
from kvstored.mover.gate import Gate, Left
from kvstored.policy.admission import make_admission
from kvstored.policy.forecast import Forecast
from kvstored.policy.orders import OrderSettings
from kvstored.policy.quota import Allotments, Quota
from kvstored.tenancy.tenants import Tenants
from kvstored.tiers.dram import DramConfig
from kvstored.tiers.nvme import NvmeConfig


def dram_config(config: Config) -> DramConfig:
    """Of the DRAM tier."""
    dram = config.dram
    return DramConfig(
        capacity_bytes=dram.capacity_bytes,
        segment_bytes=dram.segment_bytes,
        huge_pages="require" if dram.require_huge_pages else dram.huge_pages,
        lock="require" if dram.require_lock else dram.lock,
        places=numa.places() if config.gpu.enabled else {},
    )


def nvme_config(config: Config) -> NvmeConfig:
    """Of the NVMe tier."""
    nvme = config.nvme
    endurance = nvme.endurance_tbw * (len(nvme.paths) if len(nvme.endurance_tbw) == 1 else 1)
    return NvmeConfig(
        paths=nvme.paths,
        capacity_bytes=nvme.capacity_bytes,
        extent_bytes=nvme.extent_bytes,
        io_threads=nvme.io_threads,
        require_direct_io=nvme.require_direct_io,
        io_deadline_s=nvme.io_deadline_s,
        retry_s=nvme.retry_s,
        scrub_bytes_per_s=nvme.scrub_bytes_per_s,
        write_budget_bytes_per_day=nvme.write_budget_bytes_per_day,
        reinsert_share=nvme.reinsert_share,
        endurance_bytes=[round(tbw * 1e12) for tbw in endurance],
    )


def dram_allotments(config: Config, tenants: Tenants) -> Allotments:
    """What each tenant has of DRAM, kept in step with the tenants."""
    return _in_step(Allotments(config.dram.capacity_bytes), tenants, _dram_quota)


def nvme_allotments(config: Config, tenants: Tenants) -> Allotments:
    """The same of NVMe, all paths together."""
    capacity_bytes = config.nvme.capacity_bytes // config.nvme.extent_bytes * config.nvme.extent_bytes
    return _in_step(Allotments(len(config.nvme.paths) * capacity_bytes), tenants, _nvme_quota)


def _in_step(allotments: Allotments, tenants: Tenants, quota: Callable[[Tenant], Quota]) -> Allotments:
    def learn(_name: str = "") -> None:
        allotments.change({tenant.name: quota(tenant) for tenant in tenants})

    learn()
    tenants.watch(learn)
    return allotments


def _dram_quota(tenant: Tenant) -> Quota:
    return Quota(tenant.dram_limit_bytes, tenant.dram_guaranteed_bytes, tenant.weight)


def _nvme_quota(tenant: Tenant) -> Quota:
    return Quota(tenant.nvme_limit_bytes, tenant.nvme_guaranteed_bytes, tenant.weight)


def gate(config: Config, budget: Callable[[], Left | None]) -> Gate:
    """What may go to NVMe; `budget` tells what may still be written."""
    policy = config.policy
    return Gate(
        make_admission(policy.admission),
        name=policy.admission,
        memory_keys=policy.admission_memory_blocks,
        budget=budget,
        budgeted=bool(config.nvme.write_budget_bytes_per_day),
    )


def order_settings(config: Config) -> OrderSettings:
    """Which block goes first."""
    policy = config.policy
    return OrderSettings(
        policy.eviction,
        heat_half_life=policy.heat_half_life,
        heat_demote_above=policy.heat_demote_above,
        heat_promote_from=policy.heat_promote_from,
    )


def forecast(config: Config) -> Forecast | None:
    """What demotion starts early by, if anything."""
    half_life_s = config.mover.forecast_half_life_s
    return Forecast(half_life_s) if half_life_s else None
