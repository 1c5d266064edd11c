"""A contract test runs for each example of each format, or for three where no format's own code takes part."""

import pytest

from tests.helpers.format_contract import EXAMPLES, REPRESENTATIVES


@pytest.fixture(params=EXAMPLES, ids=lambda format: format.spec)
def format(request):
    return request.param


@pytest.fixture(params=REPRESENTATIVES, ids=lambda format: format.spec)
def any_format(request):
    return request.param
