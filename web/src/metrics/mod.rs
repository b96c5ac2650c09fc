//! vnplug-metrics: the daemon's counters for Prometheus.
//!
//! It asks the daemon as any client does, and needs no right but to see all counters (`observers` in the
//! daemon's configuration): so what speaks HTTP with strangers has no packet and can change nothing.

#[cfg(test)]
mod document;
mod families;
mod known;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use clap::Parser;
use tokio::net::TcpListener;
use vnplug::DEFAULT_SOCKET;
use vnplug_os::service::Manager;

use crate::api::Refusal;
use crate::ask::Asked;
use crate::connections::{self, CONNECTIONS};
use crate::server::{add_headers, objection};
use crate::{log_to_stderr, note};

/// Shows the daemon's counters to Prometheus
#[derive(Debug, Parser)]
#[command(
    name = "vnplug-metrics",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  vnplug metrics
  vnplug metrics --listen 127.0.0.1:9470
  curl http://127.0.0.1:9469/metrics

Run it as a user that the daemon's configuration names under `observers`: it then sees all counters, and may do
nothing else. Metrics are listed in docs/metrics.md; rules for alerts and a dashboard are in dist/."
)]
struct Arguments {
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9469")]
    listen: SocketAddr,
    /// Allow an address that other machines reach; there is no password
    #[arg(long)]
    allow_remote: bool,
    /// A name by which this is reached, besides addresses and localhost
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// Ports that have series of their own, and as many ports of switches
    #[arg(long, value_name = "N", default_value_t = 1000)]
    max_ports: usize,
    /// Socket of the daemon (on a host) or of the agent (in a guest)
    #[arg(long, value_name = "PATH", env = "VNPLUG_SOCKET", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

/// The program vnplug-metrics.
pub fn main() -> ExitCode {
    log_to_stderr("warn");
    match serve(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(log::Level::Error, NAME, &error);
            ExitCode::FAILURE
        }
    }
}

#[derive(Debug)]
struct Shared {
    asked: Arc<Asked>,
    names: Vec<String>,
    remote: bool,
}

fn serve(arguments: Arguments) -> Result<(), String> {
    let remote = !arguments.listen.ip().is_loopback();
    if remote && !arguments.allow_remote {
        return Err(format!(
            "{}: other machines reach this address, and there is no password: anyone who connects can read \
             who reads how much here. Listen on 127.0.0.1, or say --allow-remote",
            arguments.listen
        ));
    }
    let shared = Shared {
        asked: Arc::new(asked(arguments.socket, arguments.max_ports)),
        names: arguments.host,
        remote,
    };
    let failed = |error: io::Error| format!("{}: {error}", arguments.listen);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(1)
        .build()
        .map_err(failed)?;
    runtime.block_on(async {
        let listener = TcpListener::bind(arguments.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        // Whoever closed stdout does not want to know.
        let _ = writeln!(io::stdout(), "{NAME}: http://{address}/metrics");
        Manager::here().say_ready(&format!("Serving http://{address}/metrics"));
        let table = Arc::default();
        let limits = (HEAD, CONNECTIONS);
        connections::serve(listener, None, table, routes(shared), limits).await;
        Ok(())
    })
}

fn asked(socket: PathBuf, most: usize) -> Asked {
    Asked::new(socket, move |_, told| {
        let text = families::text(told.ok().as_ref(), most);
        text.map(Bytes::from).map_err(|error| error.to_string())
    })
}

fn routes(shared: Shared) -> Router {
    let shared = Arc::new(shared);
    Router::new()
        .route("/metrics", get(metrics))
        .fallback(|| async { Refusal::not_found("there is nothing here; metrics are at /metrics") })
        .layer(middleware::from_fn_with_state(Arc::clone(&shared), guard))
        .with_state(shared)
}

async fn guard(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let mut response = match objection(&shared.names, shared.remote, &request) {
        Some(refusal) => refusal.into_response(),
        None => next.run(request).await,
    };
    add_headers(&mut response);
    response
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    match shared.asked.answer().await {
        Ok(text) => ([(header::CONTENT_TYPE, FORMAT)], text).into_response(),
        Err(error) => Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error).into_response(),
    }
}

const NAME: &str = "vnplug-metrics";
const FORMAT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// A request's head comes within this time.
const HEAD: Duration = Duration::from_secs(10);
