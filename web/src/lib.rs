//! Two programs that speak HTTP: vnplug-web, a page with the timeline of recordings, their packets for
//! download, and what the daemon does now; and vnplug-metrics, the daemon's counters for Prometheus.
//!
//! ```text
//! connections: limits, TLS ── server: Host, headers, gate (who asks)
//!
//! browser ── server ──────────────────────────── api ──┬── table ── segment: chunks of a file ── .vnx
//!                                                    │      └── losses ── state: NAME.state
//!                                                    ├── timeline (bins, gaps) ── JSON, or a picture
//!                                                    ├── download ── vnplug_store::extract
//!                                                    └── live: rates ──┐
//!                                                                      ask (cached) ── the daemon's counters
//! scraper ── metrics: server ── families ──────────────────────────────┘
//! ```
//!
//! Programs of their own, so that `vnplug` needs no HTTP; `vnplug web` and `vnplug metrics` run them. `docs/web.md` describes
//! the page, the API, and who can reach it; `docs/metrics.md` the other one.

mod api;
mod ask;
mod bins;
mod certificate;
mod connections;
mod download;
mod gate;
mod live;
mod losses;
mod metrics;
mod page;
mod picture;
mod save;
mod secret;
mod segment;
mod server;
mod state;
mod table;
mod text;
mod timeline;
mod tls;
mod trust;
mod users;

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use log::Level;
use vnplug::DEFAULT_SOCKET;
use vnplug_os::service::{log_line, logs_to_journal, marked};
use vnplug_store::extract::{captures, raise_open_files};

use crate::gate::Gate;
use crate::server::Settings;
use crate::table::Table;
use crate::text::escape;
use crate::trust::Files;

/// Shows in the browser what the daemon does now, and recordings: a timeline, a filter, and the packets as a file
#[derive(Debug, Parser)]
#[command(
    name = "vnplug-web",
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  vnplug web
  vnplug web /data/rec
  vnplug web /disk1/rec /disk2/rec --listen 127.0.0.1:9000
  vnplug web /data/rec --svg timeline.svg
  vnplug web /data/rec --listen 10.0.0.5:8470 --tls-cert web.pem --tls-key web.key --tokens tokens
  vnplug web --new-token alice

From another machine: ssh -L 8470:127.0.0.1:8470 HOST, then http://localhost:8470/ in the browser."
)]
struct Arguments {
    /// Recordings' directories, or capture files; without one it shows what the daemon does, and nothing else
    #[arg(value_name = "DIR")]
    places: Vec<PathBuf>,
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8470")]
    listen: SocketAddr,
    /// Certificate of this server with its chain, PEM: what is shown is shown over TLS alone
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate, PEM; nobody but its owner and group may read it
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Certificates of the CA that signs clients' certificates: without one nobody is spoken to
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_client_ca: Option<PathBuf>,
    /// Lists of certificates that the CA has revoked, PEM
    #[arg(long, value_name = "FILE", requires = "tls_client_ca")]
    tls_client_crl: Option<PathBuf>,
    /// Users, one in a line: a name, the SHA-256 of a token, and `recordings` or `live` if that is all they may see
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tokens: Option<PathBuf>,
    /// Print a new token for a user of this name, and the line for --tokens, and end
    // NB: not `exclusive`: `vnplug web` gives the socket by a variable, which counts.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["places", "svg", "tokens"])]
    new_token: Option<String>,
    /// A name by which browsers reach the page, besides addresses and localhost
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// Write the timeline as a picture, and end; `-` is standard output
    #[arg(long, value_name = "FILE", requires = "places")]
    svg: Option<PathBuf>,
    /// Socket of the daemon (on a host) or of the agent (in a guest)
    #[arg(long, value_name = "PATH", env = "VNPLUG_SOCKET", default_value = DEFAULT_SOCKET)]
    socket: PathBuf,
}

pub use metrics::main as metrics;

/// The program vnplug-web.
pub fn page() -> ExitCode {
    log_to_stderr("warn,access=info");
    raise_open_files();
    let arguments = Arguments::parse();
    let done = match (&arguments.svg, &arguments.new_token) {
        (_, Some(name)) => new_token(name),
        (Some(file), _) => picture(&arguments.places, file),
        _ => serve(arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(Level::Error, "vnplug-web", &error);
            ExitCode::FAILURE
        }
    }
}

fn serve(arguments: Arguments) -> Result<(), String> {
    let remote = !arguments.listen.ip().is_loopback();
    let is_closed = arguments.tokens.is_some() || arguments.tls_client_ca.is_some();
    if remote && !is_closed {
        return Err(format!(
            "{}: other machines reach this address, and whoever connects would see everything. Say who may: --tokens or \
             --tls-client-ca, with --tls-cert and --tls-key. Or listen on 127.0.0.1 and use `ssh -L`",
            arguments.listen
        ));
    }
    let files = Files {
        certificate: arguments.tls_cert,
        key: arguments.tls_key,
        clients: arguments.tls_client_ca,
        revoked: arguments.tls_client_crl,
        tokens: arguments.tokens,
    };
    let stamps = files.stamps();
    let trust = files.read()?;
    if let [(place, error), ..] = &captures(&arguments.places).1[..] {
        return Err(format!("{}: {error}", place.display()));
    }
    server::run(Settings {
        listen: arguments.listen,
        places: arguments.places,
        socket: arguments.socket,
        names: arguments.host,
        remote,
        tls: trust.tls,
        gate: Gate::new(trust.users),
        files: (files, stamps),
    })
    .map_err(|error| format!("{}: {error}", arguments.listen))
}

/// The token goes to stdout alone, where it can be piped; the rest is for people.
fn new_token(name: &str) -> Result<(), String> {
    let (token, line) = users::new_token(name)?;
    writeln!(io::stdout(), "{token}").map_err(|error| error.to_string())?;
    note(
        Level::Info,
        "vnplug-web",
        "this is the token, which is nowhere else; for the file of --tokens:",
    );
    // As it is, to be copied.
    let _ = writeln!(io::stderr(), "{line}");
    Ok(())
}

fn picture(places: &[PathBuf], file: &Path) -> Result<(), String> {
    let is_stdout = file.as_os_str() == "-";
    if !is_stdout && save::is_read(places, file) {
        return Err(format!(
            "{}: this is a file of the recordings that are shown, or has the name of one; \
             give the picture another name, as in --svg timeline.svg",
            file.display()
        ));
    }
    let mut table = Table::new(places.to_vec());
    table.refresh(FOREVER);
    let timeline = table.timeline(None, None, PICTURE_BINS);
    for problem in &timeline.problems {
        note(Level::Warn, "vnplug-web", problem);
    }
    let names: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    let svg = picture::svg(&timeline, &names.join(", "));
    let written = match is_stdout {
        true => io::stdout().write_all(svg.as_bytes()),
        false => save::save(file, &svg),
    };
    written.map_err(|error| format!("{}: {error}", file.display()))?;
    match timeline.problems.is_empty() {
        true => Ok(()),
        false => Err("the picture shows what could be read".to_owned()),
    }
}

/// Writes the log to stderr from now on: what `VNPLUG_LOG` says, or else this.
fn log_to_stderr(filter: &str) {
    let environment = env_logger::Env::new().filter_or("VNPLUG_LOG", filter);
    let mut logger = env_logger::Builder::from_env(environment);
    if logs_to_journal() {
        logger.format(|line, record| writeln!(line, "{}", log_line(record)));
    }
    logger.init();
}

/// One line on stderr; if that fails there is nobody left to tell.
fn note(level: Level, program: &str, line: &str) {
    let text = marked(level, &format!("{program}: {}", escape(line)));
    let _ = writeln!(io::stderr(), "{text}");
}

const FOREVER: Duration = Duration::from_secs(30 * 86_400);
/// As many as the picture can show.
const PICTURE_BINS: u64 = 550;
