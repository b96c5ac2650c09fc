//! Servers of TLS and QUIC that nobody here wrote, with a certificate of their own; and a client of QUIC.

use std::fs;
use std::process::Command;

use crate::{Lab, LabError, Netns, Result};

/// Fetches a page of [`quic_server`] with ngtcp2's client, whatever the certificate says, and prints it. `$1` is the server, and
/// what it names by TLS if that is a name.
pub const FETCH_BY_QUIC: &str = "mkdir -p got && timeout 5 gtlsclient -q --exit-on-all-streams-close --timeout=2s \
     --download got $1 4433 https://203.0.113.2:4433/page && cat got/page";

/// Shows the page in Chromium, which takes this certificate, the lab's directory being the current one. `$1` is a name.
pub const BROWSE_BY_QUIC: &str = "key=$(openssl x509 -in certificate.pem -pubkey -noout | \
     openssl pkey -pubin -outform der | openssl dgst -sha256 -binary | base64) && \
     timeout 30 chromium --headless=new --no-sandbox --no-zygote --disable-gpu --user-data-dir=profile \
     --ignore-certificate-errors-spki-list=$key --origin-to-force-quic-on=$1:4433 \
     --virtual-time-budget=5000 --dump-dom https://$1:4433/page";

/// What both print.
pub const PAGE: &str = "a page by QUIC";

/// A key and a certificate for it, as files of the lab.
///
/// # Errors
/// What openssl says.
pub fn certificate(lab: &Lab) -> Result<[String; 2]> {
    let file = |name: &str| lab.dir().join(name).display().to_string();
    let [key, certificate] = ["key.pem", "certificate.pem"].map(file);
    let mut make = Command::new("openssl");
    make.args(["req", "-x509", "-newkey", "ec", "-pkeyopt"])
        .args(["ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=test"])
        .args(["-keyout", &key, "-out", &certificate]);
    let made = make.output().map_err(LabError::io("run openssl"))?;
    if made.status.success() {
        return Ok([key, certificate]);
    }
    let said = String::from_utf8_lossy(&made.stderr);
    Err(LabError::Protocol(format!("openssl: {said}")))
}

/// ngtcp2's server, at 203.0.113.2, port 4433, with one page.
///
/// # Errors
/// The system's.
pub fn quic_server(lab: &Lab, netns: &Netns) -> Result<Command> {
    let [key, certificate] = certificate(lab)?;
    let pages = lab.dir().join("quic");
    let write = || {
        fs::create_dir_all(&pages)?;
        fs::write(pages.join("page"), PAGE)
    };
    write().map_err(LabError::io("write a page"))?;
    let mut server = netns.command("gtlsserver");
    server.args(["-q", "203.0.113.2", "4433", &key, &certificate, "-d"]);
    server.arg(&pages);
    Ok(server)
}
