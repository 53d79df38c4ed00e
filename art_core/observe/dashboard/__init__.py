"""The dashboard: pages about a project's runs, read from its store.

Invariant: a page shows what the store holds and changes nothing, except where control was asked for; no page
loads anything from another machine; whatever a run recorded is text, never markup.

`app.create_app` builds the application, `serve.run` serves it. Each module of pages has a ``router``;
`page.render` fills its templates. It needs the extra ``serve``.
"""
