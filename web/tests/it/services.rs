//! What both programs tell the service manager that started them.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use vnplug_testing::PATIENCE;

use crate::support::TestDir;

/// A service that is killed when its test is over.
struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const PROGRAMS: [&str; 2] = [
    env!("CARGO_BIN_EXE_vnplug-web"),
    env!("CARGO_BIN_EXE_vnplug-metrics"),
];

#[test]
fn they_are_ready_when_they_can_be_connected_to() {
    let dir = TestDir::new("services");
    let path = dir.path("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    for program in PROGRAMS {
        let mut command = Command::new(program);
        command
            .args(["--listen", "127.0.0.1:0"])
            .stdout(Stdio::null());
        command.env("NOTIFY_SOCKET", &path);
        let _service = Service(command.spawn().unwrap());
        let mut bytes = [0; 256];
        let len = manager.recv(&mut bytes).unwrap();
        let said = std::str::from_utf8(&bytes[..len]).unwrap();
        let address = said.strip_prefix("READY=1\nSTATUS=Serving http://");
        let address = address.and_then(|rest| rest.split('/').next());
        let address: SocketAddr = address.unwrap_or(said).parse().unwrap();
        TcpStream::connect(address).unwrap();
    }
}

#[test]
fn who_cannot_listen_is_never_ready() {
    let dir = TestDir::new("services");
    let path = dir.path("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    let pause = Some(Duration::from_millis(50));
    manager.set_read_timeout(pause).unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for program in PROGRAMS {
        let mut command = Command::new(program);
        command.args(["--listen", &address]).stderr(Stdio::null());
        let status = command.env("NOTIFY_SOCKET", &path).status().unwrap();
        assert!(!status.success());
        manager.recv(&mut [0; 256]).unwrap_err();
    }
}
