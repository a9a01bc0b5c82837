"""Jobs that come while the engine reads nothing, as during a long step: how they end, and what is kept of them."""

import asyncio
import socket
import types

import pytest

from headstart.inference.checked_prompt import CheckedPrompt
from headstart.inference.sampling_params import SamplingParams
from headstart.inference.server.driver import engine_client
from headstart.inference.server.driver.job import Broken
from headstart.inference.server.driver.wire import Wire
from headstart.inference.server.options import ServerOptions

PROMPT = CheckedPrompt(None, list(range(200_000)), SamplingParams(), ())  # more than a socket holds


class NoFigures:
    def forget(self, job):
        pass

    def give_up(self, count):
        pass


@pytest.fixture
def clients(monkeypatch):
    """clients(): an EngineClient, and the socket of an engine that reads nothing."""
    monkeypatch.setattr(engine_client, "GrowingOutput", lambda *_: None)
    opened = []

    def made():
        ours, theirs = socket.socketpair()
        opened.extend((ours, theirs))
        checker = types.SimpleNamespace(eos_token_ids=())
        info = types.SimpleNamespace(model_name="m", counts={}, prompt_checker=checker, max_num_seqs=8, device="cpu")
        engine = types.SimpleNamespace(
            connection=ours, info=info, exit_status=-9, wait=lambda seconds: None, kill=theirs.close
        )
        return engine_client.EngineClient(engine, None, ServerOptions(), NoFigures()), theirs

    yield made
    for one in opened:
        one.close()


async def ended(*tasks):
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_when_the_engine_ends_every_job_is_told_so(clients):
    async def work():
        client, engine = clients()
        await client.start()
        jobs = [asyncio.create_task(client.open([PROMPT], False)) for _ in range(4)]
        await asyncio.sleep(0.1)
        engine.close()
        for error in await ended(*jobs):
            assert isinstance(error, Broken)
            assert str(error) == engine_client.ENGINE_FAILED
        assert not client._jobs

    asyncio.run(work())


def test_a_deadline_holds(clients):
    async def work():
        client, _ = clients()
        await client.start()
        jobs = [
            asyncio.create_task(client.open([PROMPT], False, asyncio.get_running_loop().time() + 0.2)) for _ in "12"
        ]
        done, _ = await asyncio.wait(jobs, timeout=20)
        assert [type(job.exception()) for job in done] == [TimeoutError] * 2

    asyncio.run(work())


def test_what_clients_submit_and_leave_does_not_pile_up(clients):
    async def work():
        client, _ = clients()
        await client.start()
        crowd = [asyncio.create_task(client.open([PROMPT], False)) for _ in range(8)]
        await asyncio.sleep(0.01)
        for _ in range(50):
            job = asyncio.create_task(client.open([PROMPT], False))
            await asyncio.sleep(0)
            job.cancel()
            await ended(job)
        for job in crowd:
            job.cancel()
        await ended(*crowd)
        assert client.num_outputs == 0
        assert client._writer.transport.get_write_buffer_size() < 2 * len(engine_client.packed(PROMPT))

    asyncio.run(work())


def test_the_engine_is_not_told_of_those_who_left_before_it_heard_of_them(clients):
    async def work():
        client, engine = clients()
        await client.start()
        jobs = [asyncio.create_task(client.open([PROMPT], False)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for job in reversed(jobs):
            job.cancel()
            await ended(job)
        wire, seen = Wire(engine), []
        while len(seen) < 2:
            seen += await asyncio.to_thread(wire.receive, True)
        assert [type(one) for one in seen] == [engine_client.Submit, engine_client.Cancel]
        assert {one.job for one in seen} == {0}

    asyncio.run(work())


def test_who_waits_to_be_submitted_is_told_of_the_end(clients):
    async def work():
        client, _ = clients()
        await client.start()
        jobs = [asyncio.create_task(client.open([PROMPT], False)) for _ in range(4)]
        await asyncio.sleep(0.05)
        client.abort()
        done, _ = await asyncio.wait(jobs, timeout=20)
        assert [str(job.exception()) for job in done] == [engine_client.STOPPED] * 4
        assert client.num_outputs == 0

    asyncio.run(work())
