"""The pages of runs: all of them, and one."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from art_core.observe.dashboard.page import render, site_of
from art_core.store.browse import run_summaries

router = APIRouter()


@router.get("/")
def runs(request: Request) -> HTMLResponse:
    """All runs, newest first."""
    return render(request, "runs.html", runs=run_summaries(site_of(request).store))
