"""The contract of routers, held against every one of ROUTERS."""

import pytest

from kvbench.engine.node import Task, keys_of
from kvbench.engine.router import ROUTERS
from tests.engine.test_cluster import cluster, job


@pytest.fixture(params=sorted(ROUTERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_one_of_the_nodes_given_and_the_same_again_from_a_new_router(kind: str) -> None:
    built = cluster({"replicas": 4, "router": kind})
    some = [built.nodes[1], built.nodes[3]]

    def chosen() -> list[int]:
        router, numbers = ROUTERS[kind]().arm(), []
        for number in range(20):
            task = Task(job(number), keys_of(built.nodes[0].cache, job(number)))
            node = router.choose(task, some)
            assert node in some  # idle nodes: there is always room
            numbers.append(node.number)
        return numbers

    assert chosen() == chosen()


def test_what_is_expected_of_an_answer_is_never_below_zero(kind: str) -> None:
    router = ROUTERS[kind]().arm()
    assert router.expected(job(1)) >= 0
    for _ in range(1000):
        router.ended(job(0), 30)
    assert router.expected(job(1)) in (0, 32)  # the prior's 8 x 256 still counts a little
