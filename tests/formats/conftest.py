"""Every contract test runs once for each example of each registered format."""

import pytest
from contract import EXAMPLES


@pytest.fixture(params=EXAMPLES, ids=lambda format: format.spec)
def format(request):
    return request.param
