//! A switch with programs of VDE, and what libvdeplug does.

use std::io::{ErrorKind, Read, Write};
use std::ops::Deref;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use vnplug_switch::{SwitchConfig, Switchboard, VdeConfig};
use vnplug_testing::TestDir;

use crate::served::Served;

/// A switch with programs of VDE.
pub(crate) struct Vde {
    // First: it is gone before its directory is.
    pub(crate) served: Served,
    pub(crate) dir: PathBuf,
    pub(crate) board: Switchboard,
    _home: Option<TestDir>,
}

pub(crate) fn config(dir: &Path) -> SwitchConfig {
    let mut config = SwitchConfig::new("lan0");
    config.vde = Some(VdeConfig {
        dir: dir.to_owned(),
        mode: 0o777,
        dir_mode: None,
        group: None,
        mgmt: None,
        user: None,
    });
    config
}

impl Vde {
    /// One whose directory is made with it.
    pub(crate) fn here(adjust: impl FnOnce(&mut SwitchConfig)) -> Self {
        let home = TestDir::new("vde");
        let mut config = config(&home.path("lan0"));
        adjust(&mut config);
        let mut switch = Self::new(config);
        switch._home = Some(home);
        switch
    }

    pub(crate) fn new(config: SwitchConfig) -> Self {
        let dir = config.vde.as_ref().unwrap().dir.clone();
        let (served, board) = Served::new(config);
        Self {
            _home: None,
            dir,
            board,
            served,
        }
    }
}

impl Deref for Vde {
    type Target = Served;

    fn deref(&self) -> &Served {
        &self.served
    }
}

/// What libvdeplug does, in a few lines.
pub(crate) struct Client {
    _ctl: UnixStream,
    pub(crate) data: UnixDatagram,
}

pub(crate) fn request(path: &Path) -> Vec<u8> {
    let mut bytes = [0xfeed_face_u32, 3, 0].map(u32::to_ne_bytes).concat();
    bytes.extend(1_u16.to_ne_bytes());
    bytes.extend(path.as_os_str().as_encoded_bytes());
    bytes.resize(12 + 110, 0);
    bytes.extend(b"a test");
    bytes
}

/// Asks with this path; the answer's path, or nothing if the switch hangs up.
pub(crate) fn ask(dir: &Path, path: &Path) -> Option<(UnixStream, PathBuf)> {
    let mut ctl = UnixStream::connect(dir.join("ctl")).unwrap();
    ctl.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    ctl.write_all(&request(path)).unwrap();
    let mut answer = [0; 110];
    ctl.read_exact(&mut answer).ok()?;
    let name = answer[2..].split(|byte| *byte == 0).next().unwrap();
    let name = std::str::from_utf8(name).unwrap().into();
    Some((ctl, name))
}

pub(crate) fn bound(path: &Path) -> UnixDatagram {
    let _ = std::fs::remove_file(path);
    let data = UnixDatagram::bind(path).unwrap();
    data.set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    data
}

impl Client {
    pub(crate) fn join(dir: &Path) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".{}-{number:05}", std::process::id()));
        let data = bound(&path);
        let (ctl, theirs) = ask(dir, &path).expect("the switch lets it in");
        data.connect(theirs).unwrap();
        std::fs::remove_file(path).unwrap();
        Self { _ctl: ctl, data }
    }

    pub(crate) fn send(&self, frame: &[u8]) {
        self.data.send(frame).unwrap();
    }

    pub(crate) fn next(&self) -> Vec<u8> {
        let mut bytes = vec![0; 70_000];
        let len = self.data.recv(&mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    }

    pub(crate) fn has_nothing(&self) -> bool {
        self.data.set_nonblocking(true).unwrap();
        let nothing = self.data.recv(&mut [0; 1]);
        self.data.set_nonblocking(false).unwrap();
        nothing.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}
