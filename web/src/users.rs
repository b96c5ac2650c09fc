//! Users by their tokens: a file with one in a line.
//!
//! ```text
//! # name  SHA-256 of the token                                              what it may see
//! alice   5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
//! wall    a665a45920422f9d417e4867efdc4fb8a04a1f3fff1fa07e998e86f7f7a27ae3  live
//! ```
//!
//! A token is 32 random bytes, so its hash needs no salt and no slow function: nobody guesses it.

use std::path::Path;

use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::secret;

/// What a user may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    Everything,
    /// Recordings and their packets.
    Recordings,
    /// What the daemon does.
    Live,
}

impl Scope {
    /// Whether it includes this path of the server.
    pub(crate) fn has(self, path: &str) -> bool {
        let is_live = path == "/api/now";
        match self {
            Self::Everything => true,
            Self::Recordings => !is_live,
            Self::Live => is_live || !path.starts_with("/api/"),
        }
    }
}

/// Somebody who showed what they must.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) scope: Scope,
}

/// All who may.
#[derive(Debug, Default)]
pub(crate) struct Users(Vec<(User, [u8; 32])>);

impl Users {
    /// Reads the file.
    ///
    /// # Errors
    /// What is wrong with it. Nothing of its words is repeated: one may be a token.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let bytes = secret::read(path, true, secret::MOST)?;
        let about = |what: String| format!("{}: {what}", path.display());
        let text = String::from_utf8(bytes).map_err(|_| about("it is no text".into()))?;
        // NB: a line that is cut before its last word would give more than the whole one.
        if !text.is_empty() && !text.ends_with('\n') {
            return Err(about(
                "its last line has no end, as if it were half written".into(),
            ));
        }
        Self::parse(&text).map_err(about)
    }

    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut users = Self::default();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().collect();
            let user = match words[..] {
                [] => continue,
                [name, hash] => user(name, hash, "everything"),
                [name, hash, scope] => user(name, hash, scope),
                [_, ..] => Err(
                    "a line is a name, the SHA-256 of a token, and what it may see, if not everything",
                ),
            };
            let user = user.map_err(|what| format!("line {number}: {what}"))?;
            if users.0.iter().any(|(known, _)| known.name == user.0.name) {
                return Err(format!("line {number}: this name was there before"));
            }
            users.0.push(user);
        }
        match users.0.is_empty() {
            true => Err("nobody is named in it".into()),
            false => Ok(users),
        }
    }

    /// Those who are not in `after` with the same token and the same rights.
    pub(crate) fn missing_in(&self, after: &Self) -> Vec<User> {
        let gone = self.0.iter().filter(|it| !after.0.contains(it));
        gone.map(|(user, _)| user.clone()).collect()
    }

    /// Whose token this is. It takes as long for every token.
    pub(crate) fn of(&self, token: &str) -> Option<&User> {
        let hash: [u8; 32] = Sha256::digest(token).into();
        let mut found = None;
        for (user, known) in &self.0 {
            if bool::from(known.ct_eq(&hash)) {
                found = Some(user);
            }
        }
        found
    }
}

fn user(name: &str, hash: &str, scope: &str) -> Result<(User, [u8; 32]), &'static str> {
    let is_legal = |c: char| c.is_ascii_alphanumeric() || "._@-".contains(c);
    if name.len() > 64 || !name.chars().all(is_legal) {
        return Err("a name has at most 64 letters, digits, and . _ @ -");
    }
    let scope = match scope {
        "everything" => Scope::Everything,
        "recordings" => Scope::Recordings,
        "live" => Scope::Live,
        _ => return Err("what it may see is `recordings`, `live`, or `everything`"),
    };
    let hash = bytes(hash).ok_or("the SHA-256 of a token has 64 digits 0-9 and a-f")?;
    let name = name.to_owned();
    Ok((User { name, scope }, hash))
}

fn bytes(hex: &str) -> Option<[u8; 32]> {
    let digits: Vec<u32> = hex.chars().map_while(|c| c.to_digit(16)).collect();
    if digits.len() != 64 || hex.len() != 64 {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        *byte = (pair[0] * 16 + pair[1]) as u8;
    }
    Some(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// 32 random bytes as text.
///
/// # Errors
/// The system's.
pub(crate) fn random() -> Result<String, String> {
    let mut bytes = [0; 32];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(32) => Ok(hex(&bytes)),
        Ok(_) => Err("the system gives no random bytes".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// A new token, and the line of the file that has it.
///
/// # Errors
/// If the name cannot be one.
pub(crate) fn new_token(name: &str) -> Result<(String, String), String> {
    let token = random()?;
    let line = format!("{name} {}", hex(&Sha256::digest(&token)));
    Users::parse(&line)?;
    Ok((token, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_token_opens_and_others_do_not() {
        let (token, line) = new_token("alice@example").unwrap();
        let (other, wall) = new_token("wall").unwrap();
        let text = format!("# who\n\n{line}\n{wall} live # the screen\n");
        let users = Users::parse(&text).unwrap();
        assert_eq!(users.of(&token).unwrap().name, "alice@example");
        let wall = users.of(&other).unwrap();
        assert_eq!((wall.name.as_str(), wall.scope), ("wall", Scope::Live));
        for wrong in [
            "",
            "x",
            &token[1..],
            &token.to_uppercase(),
            &format!("{token} "),
            &hex(&[0; 32]),
        ] {
            assert_eq!(users.of(wrong), None, "{wrong}");
        }
        // The hash itself is none.
        let (_, hash) = line.split_once(' ').unwrap();
        assert_eq!(users.of(hash), None);
    }

    #[test]
    fn a_wrong_file_is_refused_and_its_words_are_not_repeated() {
        let hash = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8";
        for (text, said) in [
            (String::new(), "nobody"),
            ("# a b\n".into(), "nobody"),
            ("alice secret-word".into(), "line 1: the SHA-256"),
            (format!("\nalice {}", &hash[1..]), "line 2: the SHA-256"),
            (format!("alice {hash} all"), "line 1: what it may see"),
            (format!("a {hash} live secret-word"), "line 1: a line is"),
            (format!("a:b {hash}"), "line 1: a name"),
            (format!("a {hash}\na {hash}"), "line 2: this name"),
            (format!("a é{}", &hash[2..]), "line 1: the SHA-256"),
        ] {
            let error = Users::parse(&text).unwrap_err();
            assert!(
                error.starts_with(said) && !error.contains("secret"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn scopes_are_apart() {
        for (scope, paths) in [
            (Scope::Everything, [true, true, true]),
            (Scope::Recordings, [true, true, false]),
            (Scope::Live, [true, false, true]),
        ] {
            let has = ["/now.html", "/api/extract", "/api/now"].map(|path| scope.has(path));
            assert_eq!(has, paths, "{scope:?}");
        }
    }
}
