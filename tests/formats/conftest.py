"""Parametrization: contract tests run for every example of every format, or for three if no format code is involved."""

import pytest

from tests.helpers.format_contract import EXAMPLES, REPRESENTATIVES


@pytest.fixture(params=EXAMPLES, ids=lambda format: format.spec)
def format(request):
    return request.param


@pytest.fixture(params=REPRESENTATIVES, ids=lambda format: format.spec)
def any_format(request):
    return request.param
