//! Machines that fetch files from each other by HTTP: guests with busybox, namespaces with Python and curl.

use std::path::{Path, PathBuf};
use std::process::Command;

use vnplug_testing::{PATIENCE, eventually};

use crate::error::{LabError, Result};
use crate::station::{Running, Station, content};
use crate::{Guest, Lab, Netns};

/// A machine, with the server that runs in it.
#[derive(Debug)]
pub enum End<'a> {
    /// With busybox.
    Guest(&'a Guest),
    /// With Python and curl.
    Host(&'a Netns, Running),
}

impl<'a> End<'a> {
    /// One that serves what is in this directory, of [`files`].
    ///
    /// # Errors
    /// The lab's.
    pub fn guest(guest: &'a Guest, www: &Path) -> Result<Self> {
        ran(guest, "mkdir -p /tmp/www");
        for name in ["bulk", "small"] {
            let to = format!("/tmp/www/{name}");
            guest.push(&www.join(name), &to, PATIENCE)?;
        }
        ran(guest, "httpd -p 7000 -h /tmp/www");
        Ok(Self::Guest(guest))
    }

    /// As [`guest`](Self::guest), in a namespace.
    ///
    /// # Errors
    /// The lab's.
    pub fn host(netns: &'a Netns, lab: &Lab, www: &Path) -> Result<Self> {
        let mut server = netns.command("python3");
        server.args(["-m", "http.server", "7000", "-d"]).arg(www);
        let server = Running::start(server, lab, &format!("http-{}", netns.name()))?;
        eventually("it serves", || {
            netns
                .exec(&["curl", "-sf", "http://127.0.0.1:7000/small"])
                .is_ok()
        });
        Ok(Self::Host(netns, server))
    }

    /// What a command prints there.
    ///
    /// # Panics
    /// If it fails.
    pub fn runs(&self, command: &str) -> String {
        match self {
            Self::Guest(guest) => ran(guest, command),
            Self::Host(netns, _) => {
                let said = netns.exec(&["sh", "-c", command]);
                said.unwrap_or_else(|error| panic!("{command}: {error}"))
            }
        }
    }

    /// The sum of the large file that it gets of an address.
    #[must_use]
    pub fn sum_from(&self, address: &str) -> String {
        let get = match self {
            Self::Guest(_) => "wget -q -O -",
            Self::Host(..) => "curl -sf --max-time 60",
        };
        let sum = self.runs(&format!("{get} http://{address}:7000/bulk | sha256sum"));
        sum.trim().to_owned()
    }

    /// Gets the small file `count` times, by a connection each; the sum of all.
    #[must_use]
    pub fn sum_of_small(&self, address: &str, count: u32) -> String {
        let url = format!("http://{address}:7000/small");
        let get = match self {
            Self::Guest(_) => {
                format!("for at in $(seq {count}); do wget -q -O - {url}; done")
            }
            // This server closes after each.
            Self::Host(..) => format!("curl -sf --max-time 60 '{url}?[1-{count}]'"),
        };
        self.runs(&format!("{get} | sha256sum")).trim().to_owned()
    }
}

/// The directory that all serve: the file `bulk`, of that number of bytes, and `small`.
///
/// # Errors
/// The system's.
pub fn files(lab: &Lab, bulk: usize) -> Result<PathBuf> {
    let dir = lab.dir().join("www");
    let what = || LabError::io("make what is served");
    std::fs::create_dir(&dir).map_err(what())?;
    for (name, len) in [("bulk", bulk), ("small", 3_000)] {
        std::fs::write(dir.join(name), content(len)).map_err(what())?;
    }
    Ok(dir)
}

/// The sum of the large file of a directory, as [`End::sum_from`] has it.
///
/// # Panics
/// If it cannot be read.
#[must_use]
pub fn sum(www: &Path) -> String {
    let mut command = Command::new("sh");
    command
        .args(["-c", "sha256sum <\"$0\""])
        .arg(www.join("bulk"));
    let said = command.output().ok().filter(|it| it.status.success());
    let said = said.unwrap_or_else(|| panic!("no sum of what {} has", www.display()));
    String::from_utf8_lossy(&said.stdout).trim().to_owned()
}

/// Has each of these, by its address, get the large file of each other.
///
/// # Panics
/// If one does not get it as it is, by this sum.
pub fn all_fetch(ends: &[(&str, End<'_>)], sum: &str) {
    for (own, end) in ends {
        for (other, _) in ends.iter().filter(|(other, _)| other != own) {
            assert_eq!(end.sum_from(other), sum, "{own} from {other}");
        }
    }
}

/// Has guests whose card is `eth0` take their addresses, of a /24 network.
///
/// # Panics
/// As [`ran`].
pub fn take_addresses(guests: &[(Guest, &str)]) {
    for (guest, address) in guests {
        let up = format!("ip addr add {address}/24 dev eth0 && ip link set eth0 up");
        ran(guest, &up);
    }
}

/// Has a station and guests ping each guest.
///
/// # Panics
/// If one does not answer.
pub fn all_ping(station: &Station, guests: &[(Guest, &str)]) {
    for (guest, address) in guests {
        assert!(station.pings(address), "{address}");
        for (_, other) in guests.iter().filter(|(_, other)| other != address) {
            ran(guest, &format!("ping -c 3 {other}"));
        }
    }
}

/// Has a station and guests get a file of `bulk` bytes from each other.
///
/// # Panics
/// As [`all_fetch`].
pub fn all_fetch_files(lab: &Lab, station: &Station, guests: &[(Guest, &str)], bulk: usize) {
    let www = files(lab, bulk).expect("files");
    let host = End::host(&station.netns, lab, &www).expect("the station serves");
    let guests = guests.iter();
    let guests = guests.map(|(it, address)| (*address, End::guest(it, &www).expect("it serves")));
    let ends: Vec<_> = guests.chain([(station.address.as_str(), host)]).collect();
    all_fetch(&ends, &sum(&www));
}

/// What a command prints in a guest.
///
/// # Panics
/// If it fails.
pub fn ran(guest: &Guest, command: &str) -> String {
    let done = guest.run(command, PATIENCE);
    let done = done.unwrap_or_else(|error| panic!("{command}: {error}"));
    assert!(done.success(), "{command}: {}", done.text());
    done.text().to_owned()
}

/// Has a guest keep its window the same on `eth0`, towards the /24 network of `address`: an ACK that changes it is not
/// expanded. It has room for far more than the window says, however late its program reads on a machine that is busy.
///
/// # Panics
/// As [`ran`].
pub fn keep_window(guest: &Guest, address: &str) {
    ran(
        guest,
        "echo '4096 4194304 8388608' >/proc/sys/net/ipv4/tcp_rmem",
    );
    let (net, _) = address.rsplit_once('.').unwrap_or_default();
    let route = format!("route add -net {net}.0 netmask 255.255.255.0 window 200000 dev eth0");
    ran(guest, &route);
}
