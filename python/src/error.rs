//! Errors as Python's exceptions; the classes are in `vnplug/_errors.py`.

use pyo3::PyErr;
use vnplug::{Error, code};

mod classes {
    pyo3::import_exception!(vnplug._errors, Error);
    pyo3::import_exception!(vnplug._errors, UnreachableError);
    pyo3::import_exception!(vnplug._errors, NotFoundError);
    pyo3::import_exception!(vnplug._errors, DeniedError);
    pyo3::import_exception!(vnplug._errors, FilterError);
    pyo3::import_exception!(vnplug._errors, InvalidError);
    pyo3::import_exception!(vnplug._errors, LimitError);
    pyo3::import_exception!(vnplug._errors, FullError);
    pyo3::import_exception!(vnplug._errors, GoneError);
    pyo3::import_exception!(vnplug._errors, ClosedError);
    pyo3::import_exception!(vnplug._errors, EndedError);
    pyo3::import_exception!(vnplug._errors, LoanError);
}

pub(crate) use classes::{ClosedError, EndedError, InvalidError, LoanError};

/// What the library says, in Python's words.
pub(crate) fn raise(error: Error) -> PyErr {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    match error {
        Error::Unreachable { .. } | Error::Disconnected | Error::TimedOut => {
            classes::UnreachableError::new_err(text)
        }
        Error::Permission { .. } => classes::DeniedError::new_err(text),
        Error::Refused { code, .. } => match code {
            code::NOT_FOUND => classes::NotFoundError::new_err(text),
            code::DENIED => classes::DeniedError::new_err(text),
            code::FILTER => classes::FilterError::new_err(text),
            code::INVALID => InvalidError::new_err(text),
            code::NO_MEMORY | code::LIMIT => classes::LimitError::new_err(text),
            code::UNAVAILABLE => classes::UnreachableError::new_err(text),
            _ => classes::Error::new_err(text),
        },
        Error::Full => classes::FullError::new_err(text),
        Error::Invalid(_) => InvalidError::new_err(text),
        Error::Gone(_)
        | Error::Quarantined
        | Error::SourceFailed(_)
        | Error::Ring(_)
        | Error::Corrupt(_) => classes::GoneError::new_err(text),
        _ => classes::Error::new_err(text),
    }
}
