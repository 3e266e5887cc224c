"""vLLM's tiered offloading on its CPU backend, which refuses it: the same spec with a worker that copies by itself."""

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies within the call; one group, one block a chunk."""

    def __init__(self, caches, region):
        (refs,) = caches.group_data_refs
        self._pages = []
        for ref in refs:
            tensor = caches.tensors[ref.tensor_idx].tensor.view(torch.int8).flatten(1)[:, : ref.page_size_bytes]
            self._pages.append((tensor, region.create_next_worker_view(ref.page_size_bytes)))
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec.block_ids, dst_spec.block_ids, store=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec.block_ids, src_spec.block_ids, store=False)

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass

    def _copy(self, job_id, blocks, chunks, store):
        for tensor, view in self._pages:
            for block, chunk in zip(blocks.tolist(), chunks.tolist(), strict=True):
                source, target = (tensor[block], view[chunk]) if store else (view[chunk], tensor[block])
                target.copy_(source)
        self._finished.append(TransferResult(job_id, True))
        return True


class CPUTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker
