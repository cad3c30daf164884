"""The files of one service process: what it offers, and what it fetches from others.

Invariants: a folder that is here as its sender has it is used in place, and where names, sizes and times are the same
nothing is read to find that out. Everything else is fetched by digest, verified whole before it appears, and continued
where an earlier fetch was cut off. A fetch has no limit in total: it is given up, with the name of its owner, when
nothing has arrived for `PATIENCE_S`, which is longer than the restart of that owner takes. An activity says how far it
is.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from flotilla.common.v1 import files_pb2 as pb
from flotilla.common.v1 import files_pb2_grpc
from flotilla.common.v1.operate_pb2 import Activity
from flotilla_core import rpc
from flotilla_core.activities import Activities
from flotilla_core.checkpoint.manifest import SHA256
from flotilla_core.config.model import LONGEST_FILE_NAME
from flotilla_core.errors import Damaged, DeadlineExceeded, FlotillaError, InvalidRequest, Unavailable
from flotilla_core.files import make_private_folder, write_atomically
from flotilla_core.logger import get_logger
from flotilla_core.transfer.cache import FETCHING, FileCache
from flotilla_core.transfer.download import Download, Parts
from flotilla_core.transfer.folders import Digests, FolderManifest, FoundFile, found_files, stamp_of
from flotilla_core.transfer.object_store import PART_BYTES as STORE_PART_BYTES
from flotilla_core.transfer.object_store import ObjectFolder
from flotilla_core.transfer.offers import Offers

if TYPE_CHECKING:
    from flotilla.common.v1.files_pb2_grpc import FileServiceAsyncStub

SILENT_S = 60.0
"""A disk may hang for a while; a peer that is gone is noticed sooner."""
PATIENCE_S = 300.0
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
LOG_EVERY_S = 30.0
"""The log says how far a fetch is: nothing else does where a service starts."""
KEY_FILE = ".key"
_MIB = 1 << 20

Tell = Callable[[str], None]
"""Takes what an activity says, whenever that changed."""

logger = get_logger()


class Files:
    """The one door to files of other hosts."""

    def __init__(
        self,
        cache: FileCache,
        connect: Callable[[str], grpc.aio.Channel],
        coordinator: Callable[[], Awaitable[str]],
        activities: Activities,
    ) -> None:
        self._cache = cache
        self._connect = connect
        self._coordinator = coordinator
        self._activities = activities
        self._digests = Digests(cache.folder / "digests.json")
        self.offers = Offers(self._digests)
        self.address = ""
        """The address at which others reach this process; empty before its port is open."""

    def offer(self, path: Path, *, sealed: bool = False) -> pb.FolderReference:
        """Offer a folder, or a Python file with its modules, to services that do not have it."""
        return self.offers.offer(path, sealed=sealed)

    async def offer_here(self, path: Path, *, sealed: bool = False) -> pb.FolderReference:
        """Offer a folder to a caller who fetches it from this process; it is read when the caller asks for it."""
        reference = await asyncio.to_thread(self.offer, path, sealed=sealed)
        reference.address = self.address
        return reference

    async def here(self, reference: pb.FolderReference, run_id: str = "", *, sealed: bool = False) -> Path:
        """Return what is offered, on this host: where it has it if it is the same here, else a copy.

        The owner is the one that the reference names, or else the coordinator.
        """
        path, pace = Path(reference.path), _Pace(reference.path, run_id)
        if reference.digest and (copy := self._cache.held(reference.digest)) is not None:
            return _within(copy, path)
        manifest: FolderManifest | None = None
        if os.path.exists(path):  # Path.exists raises for a path that is too long
            try:
                files = await asyncio.to_thread(found_files, path, sealed=sealed)
                if stamp_of(files) == reference.stamp:
                    return path
                digest = reference.digest
                if not digest:
                    async with self._owner(reference.address, pace) as stub:
                        manifest = await self._manifest(stub, reference.stamp, pace)
                    digest = manifest.digest
                if (await self._read(files, pace)).digest == digest:
                    return path
            except (Unavailable, DeadlineExceeded):
                raise
            except FlotillaError as error:
                logger.info("the folder here is not used", folder=str(path), why=str(error))
        name = reference.digest or (manifest.digest if manifest else reference.stamp)
        copy = await self.fetch(name, reference.address, what=str(path), run_id=run_id)
        return _within(copy, path)

    async def fetch(self, name: str, address: str = "", *, what: str, run_id: str = "") -> Path:
        """Return a copy of what is offered under a digest, a stamp or the name of a model."""
        if (copy := self._cache.held(name)) is not None:
            return copy
        pace = _Pace(what, run_id)

        async def fetch() -> Path:
            async with self._owner(address, pace) as stub:
                manifest = await self._manifest(stub, name, pace)
                async with self._taking(manifest, pace) as copy:
                    if copy is None:
                        await asyncio.to_thread(self._cache.make_room, manifest.digest, manifest.nbytes)
                        aside = self._cache.aside(manifest.digest)
                        await self._download(_of_peer(stub, manifest), manifest, aside, pace)
            return self._cache.folder / manifest.digest

        return await _in_spite_of_cuts(pace, fetch)

    def release(self, copy: Path) -> None:
        """Say that this process uses a copy that it fetched no more; for any other folder nothing happens."""
        if copy.parent == self._cache.folder:
            self._cache.release(copy.name)

    async def fetch_url(self, url: str, *, run_id: str = "", tell: Tell | None = None) -> Path:
        """Return a copy of a folder in object storage; one process of this host fetches it, once."""
        store, pace = ObjectFolder(url), _Pace("the folder", run_id, url, tell)

        async def fetch() -> Path:
            manifest = await asyncio.to_thread(store.manifest)
            async with self._taking(manifest, pace) as copy:
                if copy is None:
                    await asyncio.to_thread(self._cache.make_room, manifest.digest, manifest.nbytes)
                    aside = self._cache.aside(manifest.digest)
                    await self._download(_of_store(store, manifest), manifest, aside, pace)
                    await asyncio.to_thread(store.require_unchanged, manifest)
            return self._cache.folder / manifest.digest

        return await _in_spite_of_cuts(pace, fetch)

    async def fetch_checkpoint(self, url: str, folder: Path, *, run_id: str = "") -> None:
        """Bring a sealed folder in object storage to a place of this host, where it replaces what is there."""
        store, pace = ObjectFolder(url), _Pace("the folder", run_id, url)

        async def fetch() -> Path:
            manifest = await asyncio.to_thread(partial(store.manifest, sealed=True))
            aside = folder.with_name(f".{manifest.digest}{FETCHING}")
            await self._download(_of_store(store, manifest), manifest, aside, pace)
            return aside

        await asyncio.to_thread(_replace, await _in_spite_of_cuts(pace, fetch), folder)

    async def fetch_into(
        self, reference: pb.FolderReference, folder: Path, run_id: str = "", *, tell: Tell | None = None
    ) -> None:
        """Bring what another service made to a place of this host, where it replaces what is there.

        What had arrived of it stays beside that place when the caller gives up, for its next attempt.
        """
        pace = _Pace(str(folder), run_id, tell=tell)

        async def fetch() -> Path:
            async with self._owner(reference.address, pace) as stub:
                manifest = await self._manifest(stub, reference.digest or reference.stamp, pace)
                aside = folder.with_name(f".{manifest.digest}{FETCHING}")
                await self._download(_of_peer(stub, manifest), manifest, aside, pace)
            return aside

        await asyncio.to_thread(_replace, await _in_spite_of_cuts(pace, fetch), folder)

    @asynccontextmanager
    async def _owner(self, address: str, pace: _Pace) -> AsyncIterator[FileServiceAsyncStub]:
        pace.owner = address or await self._coordinator()
        async with self._connect(pace.owner) as channel:
            yield files_pb2_grpc.FileServiceStub(channel)

    async def _manifest(self, stub: FileServiceAsyncStub, name: str, pace: _Pace) -> FolderManifest:
        """Ask the owner for the files of a folder; it may have to read all of it first."""
        title = f"waiting until {pace.owner} has read {pace.what}"
        request = pb.GetManifestRequest(name=name)
        replies = rpc.server_stream(stub.GetManifest, request, idle_timeout_s=SILENT_S)
        with self._activities.doing(title, run_id=pace.run_id) as activity:
            async with aclosing(replies):
                async for reply in replies:
                    if reply.digest:
                        return _checked(reply, name)
                    pace.moved(reply.read_bytes, "read there")
                    pace.show(activity, title, reply.read_bytes, reply.bytes)
        raise Unavailable("the list of files did not come", where=pace.owner)

    async def _read(self, files: Collection[FoundFile], pace: _Pace) -> FolderManifest:
        """Return the manifest of files of this host."""
        title, whole = f"reading {pace.what}", sum(file.nbytes for file in files)
        with self._activities.doing(title, run_id=pace.run_id) as activity:
            so_far = 0

            def read(nbytes: int) -> None:
                nonlocal so_far
                so_far += nbytes
                pace.show(activity, title, so_far, whole)

            return await asyncio.to_thread(self._digests.manifest, files, read)

    @asynccontextmanager
    async def _taking(self, manifest: FolderManifest, pace: _Pace) -> AsyncIterator[Path | None]:
        """Take a copy from the cache; an activity says how far another process is that fetches it."""
        title = f"waiting for another process of this host, which fetches {pace.what}"
        with ExitStack() as shown:
            listed: list[Activity] = []

            def waits(nbytes: int) -> None:
                if not listed:
                    listed.append(shown.enter_context(self._activities.doing(title, run_id=pace.run_id)))
                pace.moved(nbytes, "arrived")
                pace.show(listed[0], title, nbytes, manifest.nbytes)

            async with self._cache.taking(manifest.digest, waits) as copy:
                shown.close()
                yield copy

    async def _download(self, parts: Parts, manifest: FolderManifest, aside: Path, pace: _Pace) -> None:
        started, whole, what = time.monotonic(), manifest.nbytes, pace.what
        title, mib = f"fetching {what} from {pace.owner}", round(whole / _MIB, 1)
        logger.info("fetching", what=what, digest=manifest.digest, owner=pace.owner, mib=mib)
        with self._activities.doing(title, run_id=pace.run_id) as activity:
            logged_at = started

            def arrived(nbytes: int) -> None:
                nonlocal logged_at
                pace.moved(nbytes, "arrived")
                pace.show(activity, title, nbytes, whole)
                if time.monotonic() - logged_at >= LOG_EVERY_S:
                    logged_at = time.monotonic()
                    logger.info("fetching", what=what, arrived_mib=round(nbytes / _MIB, 1), mib=mib)

            await Download(parts, manifest, aside, arrived).run()
        logger.info(
            "fetched",
            what=what,
            digest=manifest.digest,
            owner=pace.owner,
            files=len(manifest.files),
            mib=mib,
            seconds=round(time.monotonic() - started, 2),
        )


class _Pace:
    """Paces the attempts of one fetch: it goes on for as long as bytes arrive, or are read, now and then."""

    def __init__(self, what: str, run_id: str, owner: str = "", tell: Tell | None = None) -> None:
        self.what = what
        self.run_id = run_id
        self.owner = owner
        self._tell = tell
        self._most: dict[str, int] = {}
        self._moved_at = time.monotonic()
        self._pause_s = FIRST_PAUSE_S

    def moved(self, nbytes: int, how: str) -> None:
        """Note how many bytes are there, or were read; more than ever before is progress."""
        if nbytes > self._most.get(how, -1):
            self._most[how], self._moved_at, self._pause_s = nbytes, time.monotonic(), FIRST_PAUSE_S

    def show(self, activity: Activity, title: str, nbytes: int, whole: int) -> None:
        """Say how far it is."""
        activity.what = f"{title}: {nbytes / _MIB:,.1f} of {whole / _MIB:,.1f} MiB"
        if self._tell is not None:
            self._tell(activity.what)

    async def pause(self, error: FlotillaError) -> None:
        """Wait before the next attempt; raise when nothing has arrived for too long."""
        if time.monotonic() - self._moved_at > PATIENCE_S:
            raise DeadlineExceeded(
                f"{self.what} does not arrive",
                where=f"from {self.owner}" if self.owner else "",
                why=f"nothing came for {PATIENCE_S:g} s, at last: {error}",
                next_step="see the log of that service and the network to it; what has arrived is kept",
            ) from error
        logger.warning("a fetch was cut off and goes on", what=self.what, owner=self.owner, error=str(error))
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


async def _in_spite_of_cuts(pace: _Pace, fetch: Callable[[], Awaitable[Path]]) -> Path:
    """Return what is fetched; a fetch that was cut off, or hangs, goes on behind what has arrived."""
    while True:
        try:
            return await fetch()
        except (Unavailable, DeadlineExceeded) as error:
            await pace.pause(error)


def _of_peer(stub: FileServiceAsyncStub, manifest: FolderManifest) -> Parts:
    async def parts(name: str, offset: int) -> AsyncGenerator[bytes]:
        request = pb.ReadFileRequest(digest=manifest.digest, name=name, offset=offset)
        stream = rpc.server_stream(stub.ReadFile, request, idle_timeout_s=SILENT_S)
        async with aclosing(stream) as replies:
            async for reply in replies:
                yield reply.data

    return parts


def _of_store(store: ObjectFolder, manifest: FolderManifest) -> Parts:
    async def parts(name: str, offset: int) -> AsyncGenerator[bytes]:
        while offset < manifest.files[name].nbytes:
            data = await asyncio.to_thread(store.read, name, offset, STORE_PART_BYTES)
            if not data:
                return
            offset += len(data)
            yield data

    return parts


def _checked(reply: pb.GetManifestResponse, name: str) -> FolderManifest:
    manifest = FolderManifest.from_proto(reply)
    if SHA256.fullmatch(name) and name != manifest.digest:
        raise Damaged(
            "another folder came than the one that was asked for",
            where=f"folder {name[:12]}",
            why=f"its digest is {manifest.digest[:12]}",
        )
    return manifest


def _within(folder: Path, path: Path) -> Path:
    """Return the copy of a file of code inside its folder; a folder is a copy as a whole."""
    return folder / path.name if path.suffix == ".py" else folder


def _replace(aside: Path, folder: Path) -> None:
    if folder.exists():
        leaving = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.removing")
        folder.rename(leaving)
        aside.rename(folder)
        shutil.rmtree(leaving)
    else:
        aside.rename(folder)


def shared_folder(folder: Path) -> pb.SharedFolder:
    """Return what another service needs to find out whether it shares a folder with this one."""
    path = folder / KEY_FILE
    if not path.exists():
        write_atomically(path, secrets.token_hex(16))
    return pb.SharedFolder(path=str(path), key=path.read_text("ascii"))


def shares(place: pb.SharedFolder) -> bool:
    """Return whether this host finds the sender's key in the sender's folder."""
    path = Path(place.path)
    if path.name != KEY_FILE or not path.is_absolute() or not place.key:
        raise InvalidRequest(
            f"the path is not an absolute path to a file named {KEY_FILE}", where=f"path {place.path!r:.200}"
        )
    try:
        with path.open("rb") as file:
            return secrets.compare_digest(file.read(len(place.key) + 1), place.key.encode())
    except OSError:
        return False


def own_folder(place: Path, *parts: str) -> Path:
    """Return a folder of this host for what a session writes; a name of another host is one part of a path."""
    for part in parts:
        if Path(part).name != part or part.startswith(".") or len(part.encode()) > LONGEST_FILE_NAME:
            raise InvalidRequest(f"{part!r:.200} is no name of a folder")
    folder = place.joinpath(*parts)
    make_private_folder(folder)
    return folder
