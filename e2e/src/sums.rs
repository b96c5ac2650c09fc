//! A capture on a switch of which tshark looks at every checksum.

use std::path::PathBuf;
use std::process::Command;

use vnplug_testing::eventually;

use crate::daemon::Daemon;
use crate::recorder::read_by;
use crate::station::Running;
use crate::{Lab, LabError, Result};

/// A capture of TCP on a switch, as the wire would have carried it.
#[derive(Debug)]
pub struct Capture {
    dump: Running,
    file: PathBuf,
}

impl Capture {
    /// Begins; `name` is that of its file in the lab.
    ///
    /// # Errors
    /// The lab's.
    pub fn start(lab: &Lab, daemon: &Daemon, switch: &str, name: &str) -> Result<Self> {
        let file = lab.dir().join(format!("{name}.pcapng"));
        let source = format!("host:{switch}");
        let mut dump = daemon.command()?;
        dump.args(["dump", &source, "-f", "tcp", "--ring", "64M", "-w"]);
        dump.arg(&file);
        let mut dump = Running::start(dump, lab, name)?;
        eventually("it captures", || {
            assert!(dump.status().is_none(), "{}", dump.errors());
            std::fs::metadata(&file).is_ok_and(|file| file.len() > 0)
        });
        Ok(Self { dump, file })
    }

    /// Ends it: how many frames pass a filter of tshark's.
    ///
    /// # Panics
    /// If the capture failed.
    #[must_use]
    pub fn passing(&mut self, filter: &str) -> usize {
        self.end();
        let shown = read_by(&["tshark", "-n", "-Y", filter, "-r"], &self.file);
        shown.lines().count()
    }

    fn end(&mut self) {
        let ended = self.dump.status().unwrap_or_else(|| self.dump.finish());
        assert!(ended.success(), "{}", self.dump.errors());
    }

    /// Ends it, and has tshark look at each frame: how many there are, and how many of them say that ECN works
    /// for them.
    ///
    /// # Errors
    /// The system's.
    ///
    /// # Panics
    /// A frame has a wrong checksum, or is longer than those of the wire.
    pub fn check(mut self, about: &str) -> Result<(usize, usize)> {
        self.end();
        let mut tshark = Command::new("tshark");
        for option in [
            "tcp.check_checksum:TRUE",
            "ip.check_checksum:TRUE",
            "tcp.desegment_tcp_streams:FALSE",
        ] {
            tshark.args(["-o", option]);
        }
        for protocol in ["http", "data"] {
            tshark.args(["--disable-protocol", protocol]);
        }
        tshark.args(["-n", "-T", "fields", "-E", "separator=,"]);
        for field in FIELDS {
            tshark.args(["-e", field]);
        }
        let output = tshark.arg("-r").arg(&self.file).output();
        let output = output.map_err(LabError::io("run tshark"))?;
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        let mut with_ecn = 0;
        for line in text.lines() {
            let fields: Vec<&str> = line.split(',').collect();
            let [ip, tcp, len, ecn, number, sum, calculated] = fields[..] else {
                panic!("{about}: {line}");
            };
            // 1 is a checksum that was looked at and is right.
            // What is 0 Linux writes as 0xffff, which is right for all that receive it, but not for tshark.
            let is_zero = [sum, calculated] == ["0xffff", "0x0000"];
            let is_right = ip == "1" && (tcp == "1" || is_zero);
            assert!(is_right, "{about}: {line}: {}", self.shown(number));
            let is_short = len.parse::<u32>().is_ok_and(|len| len <= 1514);
            assert!(is_short, "{about}: {line}");
            with_ecn += usize::from(ecn != "0");
        }
        let removed = std::fs::remove_file(&self.file);
        removed.map_err(LabError::io("remove a capture"))?;
        Ok((text.lines().count(), with_ecn))
    }

    /// A frame and the bytes of it.
    fn shown(&self, number: &str) -> String {
        let filter = format!("frame.number == {number}");
        read_by(&["tshark", "-n", "-Y", &filter, "-xV", "-r"], &self.file)
    }
}

const FIELDS: [&str; 7] = [
    "ip.checksum.status",
    "tcp.checksum.status",
    "frame.len",
    "ip.dsfield.ecn",
    "frame.number",
    "tcp.checksum",
    "tcp.checksum_calculated",
];
