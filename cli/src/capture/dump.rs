//! `vnplug dump`: packets into a capture file or a pipe.

use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use vnplug::{Packet, Port};
use vnplug_frame::capfile::write::Interface;

use super::pcap::{Format, Totals, Writer};
use super::{BeforeDaemon, PortArgs, Sink, listen};
use crate::failure::{Failure, OK, Outcome};
use crate::text::grouped;
use crate::{out, sys};

/// Writes packets to a capture file, to a pipe, or to whoever connects by TCP.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug dump host:eth1 -w web.pcapng -f 'tcp port 443'
  vnplug dump host:eth1 -t 10s -w all.pcap
  vnplug dump host:eth1 | tcpdump -nr -
  vnplug dump host:eth1 --listen 57012          and: wireshark -k -i TCP@127.0.0.1:57012

Ends at Ctrl-C with the file complete. Packets lost before a packet are noted at it (pcapng).")]
pub(crate) struct Dump {
    #[command(flatten)]
    port: PortArgs,
    /// File to write; `-` is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    write: PathBuf,
    /// Send them to each client that connects there (pcap-over-IP), each from its own beginning; a PORT alone is one of
    /// the loopback
    #[arg(long, value_name = "PORT|ADDRESS:PORT", value_parser = listen::address, conflicts_with = "write")]
    listen: Option<SocketAddr>,
    /// Listen at an address that other machines reach; whoever connects reads, and nothing is encrypted
    #[arg(long, requires = "listen")]
    allow_remote: bool,
    /// Format [default: pcap for a FILE that ends in .pcap and for clients, else pcapng]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Said by the one that listens to each that serves a client of it: its process
    #[arg(long, value_name = "PID", conflicts_with = "listen", hide = true)]
    served_by: Option<u32>,
}

struct DumpSink {
    writer: Writer<Box<dyn Write>>,
    name: String,
    is_pipe: bool,
    packets: u64,
    before_daemon: BeforeDaemon,
    /// Nothing can be written any more.
    broken: bool,
}

impl Dump {
    pub(crate) fn run(&self, socket: &Path) -> Outcome {
        if let Some(listener) = self.served_by {
            listen::end_with(listener)?;
        }
        if let Some(address) = self.listen {
            if !address.ip().is_loopback() && !self.allow_remote {
                return Err(Failure::new(format!(
                    "{address} is reached from other machines, and nobody is asked who it is: listen at the loopback and \
                     reach it by ssh -L, or add --allow-remote"
                )));
            }
            // What would refuse each client refuses here.
            drop(self.port.open(socket)?);
            let classic = ["--format", "pcap"];
            let more = if self.format.is_none() {
                &classic[..]
            } else {
                &[]
            };
            return listen::serve(address, more);
        }
        if self.is_stdout() && out::is_terminal() {
            return Err(Failure::new(
                "packets are not written to a terminal; add `-w FILE` or `| tcpdump -nr -`",
            ));
        }
        let mut port = self.port.open(socket)?;
        let mut sink = self.open(&port)?;
        sys::catch_signals();
        let from_ns = now_ns();
        let driven = self.port.drive(&mut port, &mut sink);
        let lost = port.counts().lost;
        sink.before_daemon.ask(&mut port);
        let totals = Totals {
            from_ns,
            to_ns: now_ns(),
            delivered: sink.packets,
            lost,
        };
        let finished = match sink.broken {
            true => Ok(()),
            false => sink
                .writer
                .finish(&totals)
                .map_err(|error| sink.failure(error)),
        };
        out::note(&format!(
            "{} packets written, {} lost on this port{}",
            grouped(sink.writer.written()),
            grouped(lost),
            sink.before_daemon.words()
        ));
        driven.and(finished).map(|()| OK)
    }

    fn open(&self, port: &Port) -> Result<DumpSink, Failure> {
        let (file, is_pipe, name): (Box<dyn Write>, bool, String) = if self.is_stdout() {
            let stdout = io::stdout().as_fd().try_clone_to_owned()?;
            let file = File::from(stdout);
            let is_pipe = !file.metadata()?.is_file();
            (Box::new(file), is_pipe, "standard output".to_owned())
        } else {
            let name = self.write.display().to_string();
            let about = |error| Failure::about(&name, error);
            let file = File::create(&self.write).map_err(about)?;
            let is_pipe = !file.metadata().map_err(about)?.is_file();
            (Box::new(file), is_pipe, name)
        };
        let origin = Interface {
            name: port.device().to_owned(),
            link_type: port.link_type(),
            snaplen: port.snaplen(),
            filter: self.port.filter.clone(),
        };
        let mut sink = DumpSink {
            writer: Writer::new(file, self.format(), origin),
            name,
            is_pipe,
            packets: 0,
            before_daemon: BeforeDaemon::default(),
            broken: false,
        };
        // A reader of a pipe starts with the header; a full disk is found at once.
        sink.flush()?;
        Ok(sink)
    }

    fn format(&self) -> Format {
        let by_name = match self.write.extension() {
            Some(extension) if extension == "pcap" => Format::Pcap,
            _ => Format::Pcapng,
        };
        self.format.unwrap_or(by_name)
    }

    fn is_stdout(&self) -> bool {
        self.write == Path::new("-")
    }
}

impl DumpSink {
    fn flush(&mut self) -> Result<(), Failure> {
        let flushed = self.writer.flush();
        flushed.map_err(|error| self.failure(error))
    }

    fn failure(&mut self, error: io::Error) -> Failure {
        self.broken = true;
        // The second is a client's that left with packets on their way to it.
        if matches!(
            error.kind(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
        ) {
            return Failure::quiet();
        }
        let whole = grouped(self.writer.written());
        let taken = grouped(self.packets);
        Failure::about(
            &self.name,
            format!("{error}; {whole} of {taken} packets were written before"),
        )
    }
}

impl Sink for DumpSink {
    #[inline]
    fn packet(&mut self, packet: &Packet<'_>) -> Result<(), Failure> {
        self.packets += 1;
        self.before_daemon.see(packet);
        let written = self.writer.packet(packet);
        written.map_err(|error| self.failure(error))
    }

    fn idle(&mut self) -> Result<(), Failure> {
        if self.is_pipe { self.flush() } else { Ok(()) }
    }

    fn tick(&mut self, port: &mut Port) -> Result<(), Failure> {
        if self.before_daemon.marks > 0 {
            self.before_daemon.ask(port);
        }
        self.flush()
    }
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}
