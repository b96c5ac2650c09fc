//! The page's files, built into the program: ten small ones, so `include_bytes!` is all it takes.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Redirect, Response};

use crate::api::Refusal;
use crate::server::Site;
use crate::users::{Scope, User};

/// Name, type, contents.
const FILES: [(&str, &str, &[u8]); 10] = [
    (
        "index.html",
        "text/html; charset=utf-8",
        include_bytes!("../page/index.html"),
    ),
    (
        "style.css",
        "text/css; charset=utf-8",
        include_bytes!("../page/style.css"),
    ),
    (
        "page.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../page/page.js"),
    ),
    (
        "chart.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../page/chart.js"),
    ),
    (
        "now.html",
        "text/html; charset=utf-8",
        include_bytes!("../page/now.html"),
    ),
    (
        "now.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../page/now.js"),
    ),
    (
        "user.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../page/user.js"),
    ),
    (
        "login.html",
        "text/html; charset=utf-8",
        include_bytes!("../page/login.html"),
    ),
    (
        "login.js",
        "text/javascript; charset=utf-8",
        include_bytes!("../page/login.js"),
    ),
    (
        "icon.svg",
        "image/svg+xml",
        include_bytes!("../page/icon.svg"),
    ),
];

/// `/`: the recordings, if there are any to be shown to this user.
pub(crate) async fn index(
    State(shared): State<Arc<Site>>,
    Extension(user): Extension<User>,
) -> Response {
    match shared.places.is_empty() || user.scope == Scope::Live {
        true => Redirect::to("now.html").into_response(),
        false => answer(FILES[0].1, FILES[0].2),
    }
}

/// Another file of the page.
pub(crate) async fn file(Path(name): Path<String>) -> Result<Response, Refusal> {
    let found = FILES.iter().find(|(known, ..)| *known == name);
    let found =
        found.ok_or_else(|| Refusal::not_found("there is no such file; the page is at /"))?;
    Ok(answer(found.1, found.2))
}

/// What is shown to whoever asks: the way in, which has nothing of what is inside.
pub(crate) fn public(path: &str) -> Option<Response> {
    let name = path.strip_prefix('/')?;
    let names = ["login.html", "login.js", "style.css", "icon.svg"];
    let found = FILES.iter().find(|(known, ..)| *known == name);
    let found = found.filter(|_| names.contains(&name))?;
    Some(answer(found.1, found.2))
}

fn answer(kind: &'static str, bytes: &'static [u8]) -> Response {
    ([(header::CONTENT_TYPE, kind)], bytes).into_response()
}
