//! The beginning of TLS, as a sandboxed program and a server somewhere say it: the pieces in which it comes make no
//! difference.

use vnplug_sandbox::name::Name;
use vnplug_sandbox::wire::hello::{Client, Hello, Server};

use crate::Dice;

/// Checks it with these bytes: where a stream is cut, then the stream.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let cuts: Vec<usize> = (0..4).map(|_| usize::from(dice.byte())).collect();
    let stream = dice.0;
    let whole = said([stream]);
    for hello in &whole {
        if let Hello::Named(name) = hello {
            assert_eq!(Name::new(name.as_str()).as_ref(), Ok(name));
        }
    }
    assert_eq!(said(parts(stream, &cuts)), whole);
    assert_eq!(said(stream.chunks(1)), whole);
    let takes = Server::default().read(stream);
    for pieces in [parts(stream, &cuts), stream.chunks(1).collect()] {
        let mut server = Server::default();
        assert_eq!(pieces.into_iter().any(|piece| server.read(piece)), takes);
    }
}

/// What a stream says in these pieces, to its end.
fn said<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Hello> {
    let (mut client, mut said) = (Client::default(), Vec::new());
    for mut piece in pieces {
        while let Some(hello) = client.read(&mut piece) {
            let is_last = matches!(hello, Hello::Other | Hello::Wrong | Hello::Over);
            said.push(hello);
            if is_last {
                return said;
            }
        }
        assert!(piece.is_empty(), "all of it was read");
    }
    said
}

fn parts<'a>(mut stream: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut parts = Vec::new();
    for &cut in cuts {
        let (part, rest) = stream.split_at(cut.min(stream.len()));
        parts.push(part);
        stream = rest;
    }
    parts.push(stream);
    parts
}
