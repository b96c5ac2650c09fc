//! A program's channel, against a daemon that says everything at once.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::Duration;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vnplug::{ChannelOptions, Told};
use vnplug_ring::control::backend::{Connected, Mapped};
use vnplug_ring::control::wire::{Framer, MAX_REQUEST};
use vnplug_ring::control::{Backend, Message, VERSION};

use crate::support::{Dir, write_with_fds};

#[test]
fn memory_that_is_shared_at_once_may_come_with_the_answer() {
    let dir = Dir::new("channel-at-once");
    let listener = UnixListener::bind(dir.socket()).unwrap();
    let daemon = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut framer = Framer::strict(MAX_REQUEST);
        loop {
            let Some(frame) = framer.next_message().unwrap() else {
                let mut bytes = [0; 4096];
                let len = stream.read(&mut bytes).unwrap();
                if len == 0 {
                    return;
                }
                framer.push(&bytes[..len]);
                continue;
            };
            let answer = |message: Message| message.encode(frame.0.id, 0);
            match Message::from_frame(&frame).unwrap() {
                Message::Hello { .. } => {
                    let welcome = Message::Welcome {
                        version: VERSION,
                        server: "test".into(),
                        pool_id: 0,
                    };
                    write_with_fds(&stream, &answer(welcome), &[]);
                }
                Message::Backend(Backend::Connect(_)) => {
                    let connected = Connected {
                        channel: 7,
                        id: 85,
                        name: "kv".into(),
                        version: 1,
                        events_in: 0,
                        events_out: 0,
                    };
                    let mapped = Mapped {
                        channel: 7,
                        region: 3,
                        memory: 0,
                        offset: 0,
                        len: 4096,
                        writable: false,
                    };
                    let memory = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
                    ftruncate(&memory, 4096).unwrap();
                    let mut both = answer(Message::Backend(Backend::Connected(connected)));
                    both.extend(Message::Backend(Backend::Mapped(mapped)).encode(0, 0));
                    write_with_fds(&stream, &both, &[memory]);
                }
                other => panic!("{other:?}"),
            }
        }
    });
    let channel = ChannelOptions::new("kv").socket(dir.socket()).open();
    let mut channel = channel.unwrap();
    let told = channel.next(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(told, Some(Told::Shared { region: 3 }));
    assert_eq!(channel.memory(3).unwrap().load(0).unwrap(), 0);
    drop(channel);
    daemon.join().unwrap();
}
