//! The wire, the servers at its far end, and one conversation of each kind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use vnplug_testing::PATIENCE;

use crate::child::Tethered;
use crate::error::{LabError, Result};
use crate::lab::Lab;
use crate::netns::{self, Netns};
use crate::patience::until;

/// Two ends on a wire that is silent when they are.
///
/// ```text
///   near0 ── near1 ⇄ wire0 ══ wire1      ⇄ a relay, so that frames come as from a network card
///   10.78.0.2                 10.78.0.1
/// ```
#[derive(Debug)]
pub struct Talk {
    /// Where conversations begin: `near0`, 10.78.0.2 and fd78::2; the wire's other end is `wire0`.
    pub near: Netns,
    /// Where the servers are: `wire1`, 10.78.0.1 and fd78::1. Programs on the host listen here.
    pub far: Netns,
    script: PathBuf,
    _servers: Vec<Tethered>,
}

impl Talk {
    pub(super) fn start(lab: &Lab) -> Result<Self> {
        let (near, far) = (Netns::new()?, Netns::new()?);
        near.veth("near0", "near1")?;
        far.veth("wire0", "wire1")?;
        far.ip(&["link", "set", "wire0", "netns", near.name()])?;
        near.ip(&["link", "set", "wire0", "up"])?;
        end(&near, "near0", 2)?;
        end(&far, "wire1", 1)?;
        let dir = lab.dir().join("talk");
        fs::create_dir(&dir).map_err(LabError::io("make the directory of the talk"))?;
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).map_err(LabError::io(format!("write {}", path.display())))?;
            Ok(path)
        };
        let script = write("near.py", include_str!("near.py"))?;
        let servers = write("far.py", include_str!("far.py"))?;
        let relay = write("relay.py", include_str!("relay.py"))?
            .display()
            .to_string();
        certificate(&dir)?;
        let (here, servers) = (dir.display().to_string(), servers.display().to_string());
        let leases = format!("--dhcp-leasefile={here}/leases");
        let dnsmasq = [&DNSMASQ[..], &[&leases]].concat();
        let _servers = vec![
            spawn(&near, &["python3", &relay], &dir)?,
            spawn(&far, &["python3", &servers, &here, "10.78.0.1"], &dir)?,
            spawn(&far, &dnsmasq, &dir)?,
        ];
        let talk = Self {
            near,
            far,
            script,
            _servers,
        };
        let log = || fs::read_to_string(dir.join("log")).unwrap_or_default();
        until(
            || format!("the servers answer: {}", log()),
            PATIENCE,
            || Ok(talk.say("first").is_ok()),
        )?;
        Ok(talk)
    }

    /// Has one conversation: ARP, ping, HTTP, DNS, SIP, TLS, DHCP, over IPv4, some over IPv6, and
    /// tagged frames. The last packet goes to UDP port 9 and holds `last`.
    ///
    /// # Errors
    /// [`LabError::Command`] with what failed.
    pub fn say(&self, last: &str) -> Result<()> {
        let script = self.script.display().to_string();
        self.near.exec(&["python3", &script, last]).map(drop)
    }
}

/// Sets an end up. Nothing is sent but what the programs send: no merged segments, no discovery,
/// no probes. What says which groups it is in (MLD, RFC 3810, 6.1) is said again after a millisecond and
/// not after a second, which is in the midst of a test.
fn end(netns: &Netns, interface: &str, number: u8) -> Result<()> {
    let other = 3 - number;
    let offloads = ["tx", "off", "tso", "off", "gso", "off", "gro", "off"];
    netns.exec(&[&["/usr/sbin/ethtool", "-K", interface], &offloads[..]].concat())?;
    let mac = |number| format!("02:00:00:00:78:{number:02x}");
    netns.ip(&[
        "link",
        "set",
        interface,
        "addrgenmode",
        "none",
        "address",
        &mac(number),
    ])?;
    netns.ip(&[
        "link",
        "set",
        interface,
        "arp",
        "on",
        "multicast",
        "off",
        "up",
    ])?;
    let quiet = format!(
        "for version in 1 2; do
             echo 1 >/proc/sys/net/ipv6/conf/{interface}/mldv${{version}}_unsolicited_report_interval
         done
         echo 0 >/proc/sys/net/ipv6/conf/{interface}/disable_ipv6
         echo 0 >/proc/sys/net/ipv6/conf/{interface}/router_solicitations
         for ip in ipv4 ipv6; do
             echo 3600 >/proc/sys/net/$ip/neigh/{interface}/delay_first_probe_time
         done"
    );
    netns.exec(&["sh", "-ec", &quiet])?;
    netns.ip(&[
        "addr",
        "add",
        &format!("10.78.0.{number}/24"),
        "dev",
        interface,
    ])?;
    netns.ip(&[
        "addr",
        "add",
        &format!("fd78::{number}/64"),
        "dev",
        interface,
        "nodad",
    ])?;
    let neighbour = format!("fd78::{other}");
    let at = ["lladdr", &mac(other), "dev", interface, "nud", "permanent"];
    netns.ip(&[&["-6", "neigh", "replace", &neighbour], &at[..]].concat())?;
    Ok(())
}

/// A key and a certificate for the TLS server.
fn certificate(dir: &Path) -> Result<()> {
    let mut openssl = Command::new("openssl");
    openssl.current_dir(dir).args([
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=far", "-days", "2",
        "-keyout", "key.pem", "-out", "cert.pem",
    ]);
    let output = openssl.output().map_err(LabError::io("run openssl"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(LabError::Command {
        command: "openssl req".to_owned(),
        text: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Starts a server; it dies with us. What it says goes to `log` in `dir`.
fn spawn(netns: &Netns, words: &[&str], dir: &Path) -> Result<Tethered> {
    let log = dir.join("log");
    let log = fs::File::options().create(true).append(true).open(&log);
    let log = log.map_err(LabError::io("open the servers' log"))?;
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    Tethered::spawn(command, Vec::new(), Some(netns::open(netns.name())?))
}

const DNSMASQ: [&str; 12] = [
    "/usr/sbin/dnsmasq",
    "--keep-in-foreground",
    "--conf-file=/dev/null",
    "--pid-file=",
    "--user=root",
    "--no-resolv",
    "--no-hosts",
    "--bind-interfaces",
    "--listen-address=10.78.0.1",
    "--address=/lab/10.78.0.7",
    "--no-ping",
    "--dhcp-range=10.78.0.50,10.78.0.60,1h",
];
