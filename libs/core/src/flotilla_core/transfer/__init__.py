"""Folders that travel between hosts: offered by one service, fetched by digest by others that do not have them."""

from __future__ import annotations

from flotilla_core.transfer.cache import FileCache
from flotilla_core.transfer.files import Files, own_folder, shared_folder, shares
from flotilla_core.transfer.folders import files_of_functions, move_functions
from flotilla_core.transfer.offers import SERVICE_NAME as FILE_SERVICE_NAME
from flotilla_core.transfer.offers import FileServicer, Offers
