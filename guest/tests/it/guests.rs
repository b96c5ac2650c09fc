//! The agent and a reader inside real guests; the server is this process.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use serde_json::json;
use vnplug_e2e::{Guest, Image, Job, Lab, Qemu, QemuConfig, Qmp, Uml, UmlConfig};
use vnplug_ring::control::{Message, VIRTIO_PORT_NAME, code};
use vnplug_testing::{PATIENCE, eventually, until};

use crate::support::{Server, example};

fn pool(lab: &Lab) -> (PathBuf, OwnedFd) {
    let path = lab.dir().join("pool");
    let pool = fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    pool.set_len(POOL).unwrap();
    (path, pool.into())
}

fn sees(guest: &Guest, job: &Job, what: &str) {
    let look = || (job.peek(1 << 16).unwrap(), guest.console_tail(20));
    until(&format!("it says {what:?}"), look, |(output, _)| {
        output.contains(what)
    });
}

fn reopened(server: &Server, job: &Job) {
    let look = || (server.is_open(1), job.peek(1 << 16).unwrap());
    until("the port is reopened", look, |(is_open, _)| *is_open);
}

#[test]
fn uml_reads_the_mmapper_and_is_woken_over_a_tty() {
    let lab = Lab::new().unwrap();
    let (path, pool) = pool(&lab);
    let (host, tty) = UnixStream::pair().unwrap();
    let server = Server::on_channel(host, &pool, POOL, 3);
    let config = UmlConfig {
        pool: Some(path),
        lines: vec![(0, tty.into())],
        image: Image::default().program(example("inside")),
        kernel_args: vec!["vnplug=ttyS0".into()],
        ..UmlConfig::default()
    };
    let guest = Uml::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
    let job = guest
        .spawn("RUST_BACKTRACE=1 inside host:eth0 2>&1")
        .unwrap();
    sees(&guest, &job, "open host:eth0");
    for round in 0..20 {
        let text = format!("packet {round} \n\r\x03\x11\x13\x7f");
        server.send(1, 0, &[text.as_bytes()]);
        sees(&guest, &job, &format!("packet {round} \\n\\r"));
    }
}

/// A QEMU guest into which everything is plugged while it runs.
struct Plugged {
    guest: Guest,
    qmp: Qmp,
    listener: UnixListener,
    pool: OwnedFd,
    path: PathBuf,
    socket: PathBuf,
    _lab: Lab,
}

impl Plugged {
    fn boot() -> Self {
        let lab = Lab::new().unwrap();
        let (path, pool) = pool(&lab);
        let socket = lab.dir().join("channel");
        let listener = UnixListener::bind(&socket).unwrap();
        let config = QemuConfig {
            image: Image::default().program(example("inside")),
            ..QemuConfig::default()
        };
        let guest = Qemu::boot(&lab, config).unwrap_or_else(|error| panic!("{error}"));
        let qmp = guest.qmp().unwrap();
        Self {
            guest,
            qmp,
            listener,
            pool,
            path,
            socket,
            _lab: lab,
        }
    }

    fn execute(&mut self, command: &str, arguments: serde_json::Value) {
        self.qmp
            .execute(command, arguments)
            .unwrap_or_else(|error| panic!("{error}"));
    }

    fn plug_memory(&mut self) {
        let path = self.path.clone();
        self.execute(
            "object-add",
            json!({ "qom-type": "memory-backend-file", "id": "pool", "mem-path": path, "size": POOL, "share": true }),
        );
        self.execute(
            "device_add",
            json!({ "driver": "ivshmem-plain", "id": "plain", "memdev": "pool" }),
        );
    }

    fn plug_channel(&mut self) {
        let address = json!({ "type": "unix", "data": { "path": self.socket } });
        let backend = json!({ "type": "socket", "data": { "addr": address, "server": false, "reconnect": 1 } });
        self.execute(
            "chardev-add",
            json!({ "id": "channel", "backend": backend }),
        );
        self.execute(
            "device_add",
            json!({ "driver": "virtio-serial-pci", "id": "serial" }),
        );
        self.execute(
            "device_add",
            json!({ "driver": "virtserialport", "id": "port", "bus": "serial.0", "chardev": "channel", "name": VIRTIO_PORT_NAME }),
        );
    }

    /// QEMU connects, and connects again when a server died.
    fn serve(&self) -> (Server, UnixStream) {
        self.listener.set_nonblocking(true).unwrap();
        let accept = || self.listener.accept();
        let (stream, _) = until("QEMU connects", accept, Result::is_ok).unwrap();
        stream.set_nonblocking(false).unwrap();
        let copy = stream.try_clone().unwrap();
        (Server::on_channel(stream, &self.pool, POOL, 9), copy)
    }
}

#[test]
fn qemu_hot_plugged_reads_the_bar_and_survives_a_restart_of_the_host() {
    let mut plugged = Plugged::boot();
    // The agent waits for what is plugged in later.
    let job = plugged.guest.spawn("inside host:eth0 2>&1").unwrap();
    plugged.plug_memory();
    plugged.plug_channel();
    let (server, stream) = plugged.serve();
    sees(&plugged.guest, &job, "open host:eth0");
    for round in 0..20 {
        server.send(1, 0, &[format!("packet {round}!").as_bytes()]);
        sees(&plugged.guest, &job, &format!("packet {round}!"));
    }
    // The daemon dies; QEMU connects to the next one; the port reopens with a gap.
    stream.shutdown(std::net::Shutdown::Both).unwrap();
    drop((server, stream));
    let (server, stream) = plugged.serve();
    reopened(&server, &job);
    server.send(1, 0, &[b"after the restart"]);
    sees(&plugged.guest, &job, "after the restart flags 0x8");
    // An orderly unplug: the host closes the port first, then takes the devices out and back in.
    server.lock().refuse = Some((code::UNAVAILABLE, "unplugged".into()));
    server.gone(1, "the operator unplugs");
    let unmapped = |(_, message): &(u32, Message)| matches!(message, Message::Release(places) if places.len() == 1);
    eventually("its place is released", || {
        server.lock().requests.iter().any(unmapped)
    });
    stream.shutdown(std::net::Shutdown::Both).unwrap();
    drop((server, stream));
    for id in ["port", "plain"] {
        plugged.execute("device_del", json!({ "id": id }));
        plugged.qmp.wait_event("DEVICE_DELETED", PATIENCE).unwrap();
    }
    plugged.execute("object-del", json!({ "id": "pool" }));
    // QEMU aborts when a block's name comes again to the slot before the old one has gone.
    eventually("the block has gone", || {
        !plugged.qmp.has_block("pool").unwrap()
    });
    plugged.plug_memory();
    plugged.execute(
        "device_add",
        json!({ "driver": "virtserialport", "id": "port", "bus": "serial.0", "chardev": "channel", "name": VIRTIO_PORT_NAME }),
    );
    let (server, _stream) = plugged.serve();
    reopened(&server, &job);
    server.send(1, 0, &[b"plugged again"]);
    sees(&plugged.guest, &job, "plugged again flags 0x8");
}

const POOL: u64 = 4 << 20;
