//! The HTTP server: who may ask, what every answer says to the browser, and how many ask at once.
//!
//! What protects the recordings from the web pages that a user visits is checked here, for every request, before
//! [`gate`](crate::gate) asks who it is:
//!
//! - `Host` is an address or `localhost`, or a name that the operator gave: a page whose name was made
//!   to point to this address (DNS rebinding) is refused.
//! - `Sec-Fetch-Site` is not another site's, so no page can make a browser start work here. Browsers send
//!   it to this machine's own addresses and to HTTPS only: by another address or a name a page can start
//!   downloads and counts, whose answers it cannot read.
//! - No answer may be read by other sites (no CORS), framed, or taken for another kind of content.
//! - The page runs the scripts that are built in, and nothing else.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, RwLock};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use vnplug_os::service::Manager;

use crate::api::{self, Refusal};
use crate::ask::Asked;
use crate::connections::{self, CONNECTIONS, HEAD, Peer};
use crate::gate::{Access, Gate, USER};
use crate::table::Table;
use crate::tls::Entrance;
use crate::trust::{self, Files, Stamp};
use crate::{download, live, page};

/// How to serve.
pub(crate) struct Settings {
    pub(crate) listen: SocketAddr,
    pub(crate) places: Vec<PathBuf>,
    /// The daemon's.
    pub(crate) socket: PathBuf,
    /// Names that `Host` may be, besides addresses and `localhost`.
    pub(crate) names: Vec<String>,
    /// `Host` may be any address, and not only one of this machine's own.
    pub(crate) remote: bool,
    pub(crate) tls: Option<Entrance>,
    pub(crate) gate: Gate,
    /// What both were made of, and what it was like then.
    pub(crate) files: (Files, Vec<Stamp>),
}

/// What all requests share.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) table: Mutex<Table>,
    pub(crate) places: Vec<PathBuf>,
    pub(crate) live: Arc<Asked>,
    /// Timelines.
    pub(crate) work: Arc<Semaphore>,
    /// Checks and counts: a filter with a name in it may wait for the resolver for long, and others not
    /// for it.
    pub(crate) filters: Arc<Semaphore>,
    pub(crate) downloads: Arc<Semaphore>,
    /// Files that downloads found damaged or could not open, and what they said of them.
    pub(crate) damage: Mutex<BTreeMap<PathBuf, String>>,
    names: Vec<String>,
    remote: bool,
    pub(crate) gate: Gate,
}

/// Serves until the process ends.
///
/// # Errors
/// If the address cannot be listened on.
pub(crate) fn run(settings: Settings) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(WORKERS + FILTERS + DOWNLOADS + LIVE + 1)
        .build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(settings.listen).await?;
        let address = listener.local_addr()?;
        let (tls, scheme) = match &settings.tls {
            Some(tls) => (Some(Arc::new(RwLock::new(tls.clone()))), "https"),
            None => (None, "http"),
        };
        // Whoever closed stdout does not want to know.
        let _ = writeln!(io::stdout(), "vnplug-web: {scheme}://{address}/");
        let (files, stamps) = settings.files.clone();
        let site = site(settings);
        let table = Arc::new(connections::Table::default());
        Manager::here().say_ready(&format!("Serving {scheme}://{address}/"));
        let watched = (Arc::clone(&site), Arc::clone(&table));
        tokio::spawn(trust::watch(files, stamps, tls.clone(), watched));
        connections::serve(listener, tls, table, routes(site), (HEAD, CONNECTIONS)).await;
        Ok(())
    })
}

fn site(settings: Settings) -> Arc<Site> {
    Arc::new(Site {
        table: Mutex::new(Table::new(settings.places.clone())),
        places: settings.places,
        live: Arc::new(live::asked(settings.socket)),
        work: Arc::new(Semaphore::new(WORKERS)),
        filters: Arc::new(Semaphore::new(FILTERS)),
        downloads: Arc::new(Semaphore::new(DOWNLOADS)),
        damage: Mutex::default(),
        names: settings.names,
        remote: settings.remote,
        gate: settings.gate,
    })
}

fn routes(shared: Arc<Site>) -> Router {
    Router::new()
        .route("/", get(page::index))
        .route("/{file}", get(page::file))
        .route("/api/now", get(api::now))
        .route("/api/recordings", get(api::recordings))
        .route("/api/timeline", get(api::timeline))
        .route("/api/check", get(api::check))
        .route("/api/count", get(api::count))
        .route("/api/extract", get(download::extract))
        .fallback(|| async { Refusal::not_found("there is nothing here; the page is at /") })
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), guard))
        .with_state(shared)
}

async fn guard(State(shared): State<Arc<Site>>, mut request: Request, next: Next) -> Response {
    let mut access = Access::of(&request);
    let objection = objection(&shared.names, shared.remote, &request);
    let entered = match objection {
        Some(refusal) => Err(Box::new(refusal.into_response())),
        None => shared.gate.enter(&request, &mut access),
    };
    let mut response = match entered {
        Err(response) => *response,
        Ok(user) => {
            if let Some(peer) = request.extensions().get::<Peer>() {
                peer.is(&user);
            }
            let name = HeaderValue::from_str(&user.name);
            request.extensions_mut().insert(user);
            let mut response = next.run(request).await;
            if let Ok(name) = name
                && shared.gate.has_tokens()
            {
                response.headers_mut().insert(USER, name);
            }
            response
        }
    };
    shared.gate.note(&access, response.status());
    add_headers(&mut response);
    response
}

/// What every answer says to the browser.
pub(crate) fn add_headers(response: &mut Response) {
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// Why a request is refused whatever it asks for.
pub(crate) fn objection(names: &[String], remote: bool, request: &Request) -> Option<Refusal> {
    let header = |name: HeaderName| request.headers().get(name)?.to_str().ok();
    let host = header(header::HOST).or_else(|| request.uri().host());
    if !host.is_some_and(|host| is_known(host, remote, names)) {
        return Some(Refusal::forbidden(
            "this name is not known here: use the address or localhost, or start with --host NAME",
        ));
    }
    let site = header(HeaderName::from_static("sec-fetch-site"));
    let foreign = site.is_some_and(|site| !matches!(site, "same-origin" | "none"));
    // A link to the page is welcome, from wherever.
    let is_api = request.uri().path().starts_with("/api/") || request.method() != Method::GET;
    (foreign && is_api).then(|| Refusal::forbidden("another site's page must not ask for this"))
}

/// Whether a `Host` header names this server: no page of another name ever does.
fn is_known(host: &str, remote: bool, names: &[String]) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    match name.parse::<IpAddr>() {
        Ok(address) => address.is_loopback() || remote,
        Err(_) => {
            name.eq_ignore_ascii_case("localhost")
                || names.iter().any(|known| known.eq_ignore_ascii_case(name))
        }
    }
}

/// In every answer.
const HEADERS: [(HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
];
const WORKERS: usize = 4;
const FILTERS: usize = 2;
/// What asks the daemon.
const LIVE: usize = 1;
/// Downloads at a time.
pub(crate) const DOWNLOADS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_names_are_known() {
        let names = ["probe.example".to_owned()];
        for host in [
            "localhost",
            "LOCALHOST:8470",
            "127.0.0.1:1",
            "[::1]:8470",
            "[::1]",
            "127.9.9.9",
        ] {
            assert!(is_known(host, false, &[]), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "127.0.0.1.evil.example",
            "localhost.evil",
            "10.0.0.1",
            "0.0.0.0:1",
            ":80",
        ] {
            assert!(!is_known(host, false, &names), "{host}");
        }
        assert!(is_known("10.0.0.1:8470", true, &[]));
        assert!(is_known("Probe.Example:8470", false, &names));
        assert!(!is_known("evil.example", true, &names));
    }
}
